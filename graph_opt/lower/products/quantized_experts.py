"""Lower a mixture of experts on blocked weights, or on weights of 16 bits, to carryall's own kernels.

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
from ....records import dataclass
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
from ...graph.lazy import STORED, Array, SlabTensor, concat_last, halves_of, lazy, shape_of
from ...passes.base import GraphPass
from ..kernels import TilePacker
from .blocked_weight import BlockedWeight
from .half_products import OFFSETS, float_tiles
from .moe import replace_result
from .quantized_linear import (
    DOMAIN,
    form_attributes,
    kept_tiles,
    stored_attributes,
    tiled_weight,
    weight_tiles,
)
from .stored_tiles import FORMS, stacked_tiles
from .tiles import BLOCKS, COLUMNS, LAYOUT

_ACTIVATIONS = {"silu": 0, "gelu": 1, "relu2": 2}  # of the operator


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of an expert as the kernels read it.

    Args:
        tiles: uint8 [tiles, bytes].
        form: ``form_attributes``.
        inputs: of the product.
        outputs: of the product.
        name: of the weight.
    """

    tiles: ir.LazyTensor | SlabTensor
    form: Mapping[str, int]
    inputs: int
    outputs: int
    name: str


class QuantizedExpertsPass(GraphPass):
    """Lower every mixture whose experts have weights of one form into them and of one out of them.

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
    entering, leaving = (
        [_weight(layer, stored) for layers in ends for layer in layers]
        for ends in zip(*map(_ends, mixture.experts), strict=True)
    )
    for found in entering, leaving:
        reasons = [each for each in found if isinstance(each, str)]
        if reasons:
            return reasons[0]
        if len({tuple(each.form.items()) for each in found if isinstance(each, _Weight)}) > 1:
            return "the experts' weights differ in bits, block size or zero points"
    if len({(expert.activation, expert.up is None, expert.join is None) for expert in mixture.experts}) > 1:
        return "the experts do not have one activation"
    if len({each.outputs for each in entering if isinstance(each, _Weight)}) > 1:
        return "the experts differ in size"
    if any(value.dtype not in (None, ir.DataType.FLOAT) for value in (mixture.tokens, mixture.weights)):
        return "its tokens or routing weights are not float32"
    return None


def _weight(layer: Linear, stored: TilePacker | None) -> _Weight | str:
    """Return the weight of a layer, or why the kernels do not read it."""
    blocked, minima = tiled_weight(layer.weight)
    if isinstance(blocked, BlockedWeight):
        if blocked.block_size not in BLOCKS or blocked.axis != 0 or blocked.scales.dtype != ir.DataType.FLOAT:
            return (
                f"the kernels have no blocks of {blocked.block_size} on axis {blocked.axis} "
                f"with scales of {blocked.scales.dtype.name}"
            )
        tiles, form = weight_tiles(blocked, minima, stored, grouped=False)
        return _Weight(tiles, form, blocked.inputs, blocked.outputs, blocked.stem)
    tensor = weight(layer.weight)
    kept = None if tensor is None else kept_tiles(tensor, stored)
    if tensor is not None and kept is not None:
        inputs, outputs = shape_of(tensor)
        return _Weight(*kept, inputs, outputs, str(layer.weight.name))
    halves = None if tensor is None else halves_of(tensor)
    if tensor is None or halves is None:
        return "the weights of some experts are float32, or have a type without a kernel"
    inputs, outputs = shape_of(tensor)
    packed = float_tiles(halves.read, 16, inputs, outputs, by_output=False)
    return _Weight(
        packed, form_attributes(16, 1, 0, OFFSETS[halves.kind]), inputs, outputs, str(layer.weight.name)
    )


def _weights(layers: Sequence[Linear], stored: TilePacker | None) -> list[_Weight]:
    """Return the weights of the layers of a mixture that fits."""
    return [found for layer in layers if isinstance(found := _weight(layer, stored), _Weight)]


def _lower(graph: ir.Graph, mixture: Mixture, stored: TilePacker | None) -> None:
    experts = mixture.experts
    gates, downs = (
        [_weights(layers, stored) for layers in ends] for ends in zip(*map(_ends, experts), strict=True)
    )
    first, last = gates[0][0], downs[0][0]
    attributes = _attributes(
        (len(experts), first.inputs, first.outputs, last.inputs, last.outputs),
        (mixture.per_token, mixture.router is not None and mixture.router.normalize),
        (first.form, last.form),
        experts[0].activation,
        gated=experts[0].up is not None,
        join=experts[0].join,
    )
    tiles = [
        add_initializer(graph, f"{last.name}.experts_in.tiles", _stacked(gates)),
        add_initializer(graph, f"{last.name}.experts_out.tiles", _stacked(downs)),
    ]
    lengths = [[each.outputs for each in weights] for weights in (gates[0], downs[0])]
    biases = [
        _biases(
            graph,
            f"{last.name}.experts_in.bias",
            [expert.entering for expert in experts],
            lengths[0],
            COLUMNS,
        ),
        _biases(graph, f"{last.name}.experts_out.bias", [[expert.down] for expert in experts], lengths[1], 1),
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


def _stacked(experts: Sequence[Sequence[_Weight]]) -> SlabTensor:
    """Stack the tiles of experts; those of an expert's weights follow each other."""
    tiles = [[each.tiles for each in weights] for weights in experts]
    rows = sum(shape_of(each)[0] for each in tiles[0])
    shape = (len(tiles), rows, shape_of(tiles[0][0])[1])
    return SlabTensor(lambda: (each.numpy() for parts in tiles for each in parts), shape)


def _biases(
    graph: ir.Graph, name: str, experts: Sequence[Sequence[Linear]], outputs: Sequence[int], multiple: int
) -> ir.Value | None:
    """Register the biases of experts, each layer's padded to a multiple; None if no layer has one."""
    if all(layer.bias is None for layers in experts for layer in layers):
        return None
    lengths = [-(-count // multiple) * multiple for count in outputs]
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
