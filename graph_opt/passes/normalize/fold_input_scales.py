"""Fold per-channel factors and terms in front of a convolution into its weight and bias.

    Conv(x * s + t, W, b)  -> Conv(x, W * s, b + sum(W * t))     without padding
                           -> Conv(x + t / s, W * s, b) with padding: the padded zeros must stay zeros

Examples are learnable scales behind activations, and the normalization of images.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...analysis.channel_changes import Channels, Vector, change_of_channels
from ...graph.edit import (
    add_initializer,
    insert,
    int_attribute,
    remove_unused,
    sole_consumer,
    text_attribute,
    weight,
)
from ...graph.lazy import Array, lazy, shape_of
from ..base import EveryGraphPass
from .fold_scales import FLOATS

_LARGEST_SHIFT = 1e3  # of t / s; adding a larger term would lose precision


class FoldInputScalesPass(EveryGraphPass):
    """Fold constant factors and terms per input channel into the convolution."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every convolution with a constant weight."""
        for node in list(graph):
            if node.op_type != "Conv" or node.domain or node.graph is not graph:
                continue
            matrix = weight(node.inputs[1])
            if matrix is None or matrix.dtype not in FLOATS:
                continue
            source, factors, terms, changes = _changes(node, matrix)
            if source is None or changes == 0:
                continue
            if node.inputs[1] is not None and len(node.inputs[1].uses()) > 1:
                self.refuse(node, "its weight has other consumers and would be stored twice")
                continue
            reason = self._fold(graph, node, source, (factors, terms), changes)
            if reason is not None:
                self.refuse(node, reason)

    def _fold(
        self, graph: ir.Graph, node: ir.Node, source: ir.Value, by: tuple[Vector, Vector], changes: int
    ) -> str | None:
        """Fold factors and terms (with padding the factors only), or return why that is not possible."""
        factors, terms = by
        matrix, old = weight(node.inputs[1]), node.inputs[0]
        bias = weight(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
        if matrix is None or node.inputs[1] is None or old is None:
            raise AssertionError("unreachable: the weight was checked")
        name, dtype = node.inputs[1].name, matrix.dtype.numpy()
        x = source
        if not terms.any():
            pass
        elif not _pads(node):
            if len(node.inputs) > 2 and node.inputs[2] is not None and bias is None:
                return "its bias is not constant"
            shift = lazy(_shifted(node, matrix, bias, terms), matrix.dtype, (shape_of(matrix)[0],))
            node.resize_inputs(3)
            node.replace_input_with(2, add_initializer(graph, f"{name}.shift", shift))
        else:
            # A padded convolution reads zeros at the edge, which the term would not have reached: it cannot
            # go into the bias. Factors still can, so factors * x + terms = factors * (x + terms / factors)
            # keeps one Add, which is worth it only where two nodes or more go.
            with np.errstate(all="ignore"):
                rest = terms / factors
            if changes < 2 or not (np.abs(rest) <= _LARGEST_SHIFT).all():
                return "a term in front of a padded convolution cannot be folded"
            content = _column(rest, len(shape_of(matrix))).astype(dtype)
            added = insert(node, "Add", [source, add_initializer(graph, f"{name}.before", content)])
            x = added.outputs[0]
            x.type, x.shape = old.type, old.shape
        if (factors != 1).any():
            scaled = _per_input(node, matrix, factors)
            node.replace_input_with(1, add_initializer(graph, f"{name}.scaled", scaled))
        node.replace_input_with(0, x)
        remove_unused(graph, old.producer())
        self.fired += 1
        return None


def _changes(node: ir.Node, matrix: ir.TensorProtocol) -> tuple[ir.Value | None, Vector, Vector, int]:
    """Return the value before the scaling nodes, their combined factors and terms, and their number."""
    shape = shape_of(matrix)
    count = shape[1] * int_attribute(node, "group", 1)
    channels = Channels(count, len(shape) - 2, len(shape))
    factors, terms = np.ones(count), np.zeros(count)
    best, reader = (node.inputs[0], factors, terms, 0), node
    value, num_changes = node.inputs[0], 0
    while value is not None and sole_consumer(value) is reader:
        producer = value.producer()
        if producer is None or producer.graph is not node.graph:
            break
        operands = [x for x in producer.inputs if x is not None and weight(x) is None]
        change = change_of_channels(producer, operands[0], channels) if len(operands) == 1 else None
        if change is None or not np.isfinite(change[0]).all():
            break
        factors, terms = factors * change[0], terms + factors * change[1]
        num_changes, value, reader = num_changes + 1, operands[0], producer
        if _keeps_rank(value, channels):
            best = (value, factors, terms, num_changes)
    return best


def _keeps_rank(value: ir.Value, channels: Channels) -> bool:
    """Return whether a value has all axes and channels, that is, no constant broadcasts it."""
    if value.shape is None or len(value.shape) != channels.rank:
        return False
    size = value.shape[channels.rank - 1 - channels.behind]
    return size == channels.count


def _pads(node: ir.Node) -> bool:
    pads = node.attributes.get("pads")
    if text_attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return True
    return pads is not None and any(pads.as_ints())


def _grouped(node: ir.Node, shape: tuple[int, ...], numbers: Vector) -> tuple[tuple[int, ...], Array]:
    """Return the weight's shape as [groups, outputs, inputs, ...], and ``numbers`` broadcastable to it."""
    group = int_attribute(node, "group", 1)
    parts = (group, shape[0] // group, *shape[1:])
    return parts, numbers.reshape(group, 1, shape[1], *[1] * (len(shape) - 2))


def _per_input(node: ir.Node, matrix: ir.TensorProtocol, factors: Vector) -> ir.LazyTensor:
    shape = shape_of(matrix)
    parts, wide = _grouped(node, shape, factors)
    narrow = wide.astype(matrix.dtype.numpy())
    return lazy(lambda: (matrix.numpy().reshape(parts) * narrow).reshape(shape), matrix.dtype, shape)


def _shifted(
    node: ir.Node, matrix: ir.TensorProtocol, bias: ir.TensorProtocol | None, terms: Vector
) -> Callable[[], Array]:
    shape = shape_of(matrix)
    parts, wide = _grouped(node, shape, terms)

    def compute() -> Array:
        sums = (matrix.numpy().astype(np.float64).reshape(parts) * wide).reshape(shape[0], -1).sum(-1)
        total = sums if bias is None else bias.numpy() + sums
        return np.asarray(total, matrix.dtype.numpy())

    return compute


def _column(numbers: Vector, rank: int) -> Array:
    """Return one number per channel, broadcastable to a convolution's input; a scalar if all are equal."""
    if (numbers == numbers[0]).all():
        return np.asarray(numbers[0])
    return numbers.reshape(-1, *[1] * (rank - 2))
