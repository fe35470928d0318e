"""Lower a mixture of experts on blocked weights to carryall's own kernels.

    QuantizedExperts(x, scores, tiles of gate and up, tiles of down, biases)

It routes tokens by their scores as the canonical mixture does, and computes the tokens of an expert together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...experts.mixture import Expert, Linear, Mixture, find_mixture
from ...graph.edit import add_initializer, insert, nodes_of, weight
from ...graph.lazy import Array, lazy, shape_of
from ...passes.base import GraphPass
from .blocked_weight import BlockedWeight
from .moe import replace_mixture
from .quantized_linear import DOMAIN, offsets_of, packed_tiles, tiled_weight
from .tiles import BLOCKS, COLUMNS, LAYOUT

_Found = tuple[BlockedWeight, ir.TensorProtocol | None]


class QuantizedExpertsPass(GraphPass):
    """Lower every mixture whose experts have blocked weights of one kind."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Split."""
        for node in nodes_of(graph, "Split"):
            found = find_mixture(node)
            if not isinstance(found, Mixture):
                continue  # the pass of other targets' operators, which follows, says why
            reason = _misfit(found)
            if reason is None:
                _lower(graph, found)
                self.fired += 1
            else:
                self.refuse(node, reason)


def _misfit(found: Mixture) -> str | None:
    """Return why the kernels cannot compute a mixture, None if they can."""
    layers = [layer for one in found.experts for layer in one.layers]
    weights = [tiled_weight(layer.weight) for layer in layers]
    kinds = {
        (one.bits, one.block_size, one.axis, one.scales.dtype, offsets_of(one, minima))
        for one, minima in weights
        if isinstance(one, BlockedWeight)
    }
    if not all(isinstance(one, BlockedWeight) for one, _ in weights):
        return "the weights of some experts are float, or have a type without a kernel"
    if len(kinds) > 1:
        return "the experts' weights differ in bits, block size or zero points"
    _, block_size, axis, dtype, _ = next(iter(kinds))
    if block_size not in BLOCKS or axis != 0 or dtype != ir.DataType.FLOAT:
        return f"the kernels have no blocks of {block_size} on axis {axis} with scales of {dtype.name}"
    if len({one.activation for one in found.experts}) > 1 or found.experts[0].activation.name != "silu":
        return "the experts do not have one activation, which is SiLU"
    if len({one.outputs for one, _ in _blocked(found.experts, 0) + _blocked(found.experts, 1)}) > 1:
        return "the experts differ in size"
    return None


def _blocked(experts: Sequence[Expert], place: int) -> list[_Found]:
    """Return the weight of gate (0), up (1) or down (2) of each expert."""
    found = [tiled_weight(one.layers[place].weight) for one in experts]
    return [(one, minima) for one, minima in found if isinstance(one, BlockedWeight)]


def _lower(graph: ir.Graph, found: Mixture) -> None:
    gate, up, down = (_blocked(found.experts, place) for place in range(3))
    first, minima = gate[0]
    activation = found.experts[0].activation
    attributes: dict[str, int | float] = {
        "layout": LAYOUT,
        "num_experts": len(found.experts),
        "per_token": found.per_token,
        "normalize": int(found.normalize),
        "hidden": first.inputs,
        "width": first.outputs,
        "bits": first.bits,
        "block_size": first.block_size,
        "offsets": offsets_of(first, minima),
        "alpha": activation.alpha,
        "beta": activation.beta,
        "limit": activation.limit,
    }
    name = down[0][0].stem
    pairs = [[*pair] for pair in zip(gate, up, strict=True)]
    entering = add_initializer(graph, f"{name}.experts_in.tiles", _stacked(pairs))
    leaving = add_initializer(graph, f"{name}.experts_out.tiles", _stacked([[one] for one in down]))
    biases = [
        _biases(graph, f"{name}.experts_in.bias", [one.layers[:2] for one in found.experts], COLUMNS),
        _biases(graph, f"{name}.experts_out.bias", [one.layers[2:] for one in found.experts], 1),
    ]
    operands = [found.tokens, found.scores, entering, leaving, *biases]
    while operands[-1] is None:
        operands.pop()
    before = found.result.producer()
    if before is None:
        raise AssertionError("unreachable: the result is that of a MatMul")
    lowered = insert(before, "QuantizedExperts", operands, attributes, domain=DOMAIN)
    lowered.name = before.name
    replace_mixture(graph, found, lowered.outputs[0])


def _stacked(experts: Sequence[Sequence[_Found]]) -> ir.LazyTensor:
    """Stack the tiles of experts; those of an expert's weights follow each other."""
    tiles = [[packed_tiles(*one) for one in parts] for parts in experts]
    rows = sum(shape_of(one)[0] for one in tiles[0])
    shape = (len(tiles), rows, shape_of(tiles[0][0])[1])

    def compute() -> Array:
        result = np.empty(shape, np.uint8)
        for index, parts in enumerate(tiles):
            np.concatenate([one.numpy() for one in parts], out=result[index])
        return result

    return lazy(compute, ir.DataType.UINT8, shape)


def _biases(
    graph: ir.Graph, name: str, experts: Sequence[Sequence[Linear]], multiple: int
) -> ir.Value | None:
    """Register the biases of experts, each layer's padded to a multiple; None if no layer has one."""
    if all(layer.bias is None for layers in experts for layer in layers):
        return None
    lengths = [-(-_outputs(layer) // multiple) * multiple for layer in experts[0]]
    shape = (len(experts), sum(lengths))

    def compute() -> Array:
        result = np.zeros(shape, np.float32)
        for row, layers in zip(result, experts, strict=True):
            start = 0
            for layer, length in zip(layers, lengths, strict=True):
                if (bias := weight(layer.bias)) is not None:
                    row[start : start + bias.size] = bias.numpy()
                start += length
        return result

    return add_initializer(graph, name, lazy(compute, ir.DataType.FLOAT, shape))


def _outputs(layer: Linear) -> int:
    """Return the outputs of a layer with a blocked weight."""
    found, _ = tiled_weight(layer.weight)
    return found.outputs if isinstance(found, BlockedWeight) else 0
