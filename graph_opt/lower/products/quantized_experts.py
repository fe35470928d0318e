"""Lower a mixture of experts on blocked weights to carryall's own kernels.

    QuantizedExperts(x, scores, tiles of gate and up, tiles of down, biases, chosen)

It computes the tokens of an expert together. Routed by a softmax, it chooses the experts itself, by the
router's logits; otherwise other nodes choose them and compute their weights, which are then its scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ....contract import EXPERT_STACKS, EXPERTS_DOMAIN
from ....errors import GraphError
from ....storage.stored_tensor import StoredStack
from ...experts.mixture import Activation, Expert, Linear, Mixture, find_mixture
from ...graph.edit import (
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    text_attribute,
    weight,
)
from ...graph.lazy import STORED, Array, SlabTensor, concat_last, lazy, shape_of
from ...passes.base import GraphPass
from ..kernels import TilePacker
from .blocked_weight import BlockedWeight
from .moe import replace_result
from .quantized_linear import DOMAIN, stored_attributes, tiled_weight, weight_tiles
from .stored_tiles import FORMS, stacked_tiles
from .tiles import BLOCKS, COLUMNS, LAYOUT

_Found = tuple[BlockedWeight, ir.TensorProtocol | None]
_ACTIVATIONS = {"silu": 0, "gelu": 1, "relu2": 2}  # of the operator


class QuantizedExpertsPass(GraphPass):
    """Lower every mixture whose experts have blocked weights, of one form into them and of one out of them.

    Args:
        stored: writes weights of GGUF files as tiles of the same size; None takes their levels and scales.
    """

    def __init__(self, stored: TilePacker | None = None) -> None:
        super().__init__()
        self._stored = stored

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower stacks of experts, and try every Split.

        Raises:
            GraphError: there are stacks, but the target does not take their blocks.
        """
        for node in nodes_of(graph, EXPERT_STACKS, EXPERTS_DOMAIN):
            _lower_stacks(graph, node, self._stored)
            self.fired += 1
        for node in nodes_of(graph, "Split"):
            mixture = find_mixture(node)
            if not isinstance(mixture, Mixture):
                continue  # the pass of other targets' operators, which follows, says why
            reason = _misfit(mixture, self._stored)
            if reason is None:
                _lower(graph, mixture, self._stored)
                self.fired += 1
            else:
                self.refuse(node, reason)


def _misfit(mixture: Mixture, stored: TilePacker | None) -> str | None:
    """Return why the kernels cannot compute a mixture, None if they can."""
    layers = [layer for expert in mixture.experts for layer in expert.layers]
    weights = [tiled_weight(layer.weight) for layer in layers]
    blocked = [(expert, minima) for expert, minima in weights if isinstance(expert, BlockedWeight)]
    if len(blocked) < len(weights):
        return "the weights of some experts are float, or have a type without a kernel"
    for expert, _ in blocked:
        if expert.block_size not in BLOCKS or expert.axis != 0 or expert.scales.dtype != ir.DataType.FLOAT:
            scales = expert.scales.dtype.name
            return (
                f"the kernels have no blocks of {expert.block_size} on axis {expert.axis} "
                f"with scales of {scales}"
            )
    entering = [_blocked(expert.entering) for expert in mixture.experts]
    for pairs in _joined(entering), _blocked([expert.down for expert in mixture.experts]):
        if len({tuple(_tiles(pair, stored)[1].items()) for pair in pairs}) > 1:
            return "the experts' weights differ in bits, block size or zero points"
    if len({(expert.activation, expert.up is None, expert.join is None) for expert in mixture.experts}) > 1:
        return "the experts do not have one activation"
    if len({expert.outputs for expert, _ in _joined(entering)}) > 1:
        return "the experts differ in size"
    if any(value.dtype not in (None, ir.DataType.FLOAT) for value in (mixture.tokens, mixture.weights)):
        return "its tokens or routing weights are not float32"
    return None


def _blocked(layers: Sequence[Linear]) -> list[_Found]:
    """Return the weight of each layer."""
    found = [tiled_weight(layer.weight) for layer in layers]
    return [(one, minima) for one, minima in found if isinstance(one, BlockedWeight)]


def _joined(experts: Sequence[Sequence[_Found]]) -> list[_Found]:
    return [pair for pairs in experts for pair in pairs]


def _tiles(pair: _Found, stored: TilePacker | None) -> tuple[ir.LazyTensor, dict[str, int]]:
    return weight_tiles(*pair, stored, grouped=False)


def _lower(graph: ir.Graph, mixture: Mixture, stored: TilePacker | None) -> None:
    experts = mixture.experts
    gates, downs = ([_blocked(layers) for layers in ends] for ends in zip(*map(_ends, experts), strict=True))
    (first, _), (last, _) = gates[0][0], downs[0][0]
    attributes = _attributes(
        (len(experts), first.inputs, first.outputs, last.inputs, last.outputs),
        (mixture.per_token, mixture.router is not None and mixture.router.normalize),
        (_tiles(gates[0][0], stored)[1], _tiles(downs[0][0], stored)[1]),
        experts[0].activation,
        gated=experts[0].up is not None,
        join=experts[0].join,
    )
    name = last.stem
    tiles = [
        add_initializer(graph, f"{name}.experts_in.tiles", _stacked(gates, stored)),
        add_initializer(graph, f"{name}.experts_out.tiles", _stacked(downs, stored)),
    ]
    biases = [
        _biases(graph, f"{name}.experts_in.bias", [expert.entering for expert in experts], COLUMNS),
        _biases(graph, f"{name}.experts_out.bias", [[expert.down] for expert in experts], 1),
    ]
    scores, chosen = (
        (mixture.weights, mixture.chosen) if mixture.router is None else (mixture.router.scores, None)
    )
    operands = _operands(mixture.tokens, scores, tiles, biases, chosen)
    before = mixture.result.producer()
    if before is None:
        raise AssertionError("unreachable: the result is that of a MatMul")
    lowered = insert(before, "QuantizedExperts", operands, attributes, domain=DOMAIN)
    lowered.name = before.name
    replace_result(graph, mixture.result, lowered.outputs[0])


def _ends(expert: Expert) -> tuple[Sequence[Linear], Sequence[Linear]]:
    """Return the layers into an expert and the one out of it."""
    return expert.entering, [expert.down]


def _operands(
    tokens: ir.Value | None,
    scores: ir.Value | None,
    tiles: Sequence[ir.Value],
    biases: Sequence[ir.Value | None],
    chosen: ir.Value | None,
) -> list[ir.Value | None]:
    """Return the inputs of the operator, without those behind the last that there is."""
    operands = [tokens, scores, *tiles, *biases, chosen]
    while operands[-1] is None:
        operands.pop()
    return operands


def _lower_stacks(graph: ir.Graph, node: ir.Node, stored: TilePacker | None) -> None:
    """Lower a node of ``EXPERT_STACKS``, whose result is [tokens, 1, hidden]."""
    tokens, scores, chosen, *rest = node.inputs
    count = len(node.attributes["stored_bits"].as_ints())
    stacks, added = rest[:count], [tensor for bias in rest[count:] if (tensor := weight(bias)) is not None]
    tensors = [tensor for stack in stacks if (tensor := weight(stack)) is not None]
    blocks = [stack for tensor in tensors if isinstance(stack := tensor.meta.get(STORED), StoredStack)]
    if (
        stored is None
        or len(blocks) < len(stacks)
        or not {stack.type_name for stack in blocks} <= FORMS.keys()
    ):
        raise GraphError(f"{node.name} has stacks of experts, whose blocks the target does not take")
    *gates, down = blocks
    experts, hidden, width = down.shape
    attributes = _attributes(
        (experts, hidden, width, width, hidden),
        (int_attribute(node, "per_token", 1), bool(int_attribute(node, "normalize", 0))),
        (stored_attributes(gates[0].type_name), stored_attributes(down.type_name)),
        Activation(
            text_attribute(node, "activation", "silu"),
            alpha=float_attribute(node, "alpha", 1.0),
            beta=float_attribute(node, "beta", 0.0),
            limit=float_attribute(node, "limit", math.inf),
        ),
        gated=bool(int_attribute(node, "gated", 1)),
    )
    name = str(stacks[-1] and stacks[-1].name)
    tiles = [
        add_initializer(graph, f"{name}.experts_in.tiles", stacked_tiles(gates, stored)),
        add_initializer(graph, f"{name}.experts_out.tiles", stacked_tiles([down], stored)),
    ]
    biases: list[ir.Value | None] = [None, None]
    if added:
        biases = [
            add_initializer(graph, f"{name}.experts_in.bias", concat_last(added[:-1])),
            add_initializer(graph, f"{name}.experts_out.bias", added[-1]),
        ]
    operands = _operands(tokens, scores, tiles, biases, chosen)
    lowered = insert(node, "QuantizedExperts", operands, attributes, domain=DOMAIN)
    lowered.name = node.name
    replace_result(graph, node.outputs[0], lowered.outputs[0])


def _attributes(
    sizes: tuple[int, int, int, int, int],
    routing: tuple[int, bool],
    forms: tuple[Mapping[str, int], Mapping[str, int]],
    activation: Activation,
    *,
    gated: bool,
    join: ir.Node | None = None,
) -> dict[str, int | float]:
    """Return the attributes of the operator.

    Args:
        sizes: number of experts, the hidden size, their width, the inputs and outputs of the layer behind it.
        routing: the number of a token's experts, and whether their softmax is scaled to sum to 1.
        forms: ``form_attributes`` of the weights into the experts and out of them.
        activation: the function between.
        gated: whether it is multiplied by an up projection.
        join: of one expert's width over ranks; the operator joins those of all.
    """
    return {
        "layout": LAYOUT,
        "num_experts": sizes[0],
        "per_token": routing[0],
        "normalize": int(routing[1]),
        "hidden": sizes[1],
        "width": sizes[2],
        "inputs": sizes[3],
        "outputs": sizes[4],
        **{name: 0 if join is None else int_attribute(join, name, 0) for name in ("rank", "ranks", "number")},
        **forms[0],
        **{f"out_{name}": value for name, value in forms[1].items()},
        "activation": _ACTIVATIONS[activation.name],
        "gated": int(gated),
        "alpha": activation.alpha,
        "beta": activation.beta,
        "limit": activation.limit,
    }


def _stacked(experts: Sequence[Sequence[_Found]], stored: TilePacker | None) -> SlabTensor:
    """Stack the tiles of experts; those of an expert's weights follow each other."""
    tiles = [[_tiles(pair, stored)[0] for pair in parts] for parts in experts]
    rows = sum(shape_of(one)[0] for one in tiles[0])
    shape = (len(tiles), rows, shape_of(tiles[0][0])[1])
    return SlabTensor(lambda: (one.numpy() for parts in tiles for one in parts), shape)


def _biases(
    graph: ir.Graph, name: str, experts: Sequence[Sequence[Linear]], multiple: int
) -> ir.Value | None:
    """Register the biases of experts, each layer's padded to a multiple; None if no layer has one."""
    if all(layer.bias is None for layers in experts for layer in layers):
        return None
    lengths = [-(-_outputs(layer) // multiple) * multiple for layer in experts[0]]
    shape = (len(experts), sum(lengths))
    # Now, because the values leave the graph with the nodes that read them.
    tensors = [[weight(layer.bias) for layer in layers] for layers in experts]

    def compute() -> Array:
        result = np.zeros(shape, np.float32)
        for row, biases in zip(result, tensors, strict=True):
            start = 0
            for bias, length in zip(biases, lengths, strict=True):
                if bias is not None:
                    row[start : start + bias.size] = bias.numpy()
                start += length
        return result

    return add_initializer(graph, name, lazy(compute, ir.DataType.FLOAT, shape))


def _outputs(layer: Linear) -> int:
    """Return the outputs of a layer with a blocked weight."""
    found, _ = tiled_weight(layer.weight)
    return found.outputs if isinstance(found, BlockedWeight) else 0
