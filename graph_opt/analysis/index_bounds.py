"""Bounds of integers that index other tensors, read from the shapes of these tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import constant, int_attribute, static_size
from .probe_sizes import axis_name
from .shape_facts import ShapeFacts

Axis = tuple[str, int, int]  # an input's name, the index of one of its axes, and a number to add to its size
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")
_UNPACKED = frozenset({"Cast", "DequantizeLinear", "Identity"})


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The numbers in operand ``index`` are below the size of an axis of operand ``table``.

    Attributes:
        index: position of the indices among the operands.
        table: position of the indexed tensor.
        attribute: attribute with the axis; "" if there is none.
        axis: the axis, or the default of the attribute.
        counts: whether the numbers are counts, which may equal the size.
    """

    index: int
    table: int
    attribute: str = ""
    axis: int = 0
    counts: bool = False


_LOOKUPS = {
    "ArrayFeatureExtractor": [_Lookup(1, 0, axis=-1)],
    "GRU": [_Lookup(4, 0, "layout", counts=True)],
    "Gather": [_Lookup(1, 0, "axis")],
    "GatherElements": [_Lookup(1, 0, "axis")],
    "LSTM": [_Lookup(4, 0, "layout", counts=True)],
    "NegativeLogLikelihoodLoss": [_Lookup(1, 0, axis=1)],
    "RNN": [_Lookup(4, 0, "layout", counts=True)],
    "ReverseSequence": [_Lookup(1, 0, "time_axis", counts=True)],
    "RoiAlign": [_Lookup(2, 0)],
    "RotaryEmbedding": [_Lookup(3, 1)],
    "Scatter": [_Lookup(1, 0, "axis")],
    "ScatterElements": [_Lookup(1, 0, "axis")],
    "SoftmaxCrossEntropyLoss": [_Lookup(1, 0, axis=1)],
    "TopK": [_Lookup(1, 0, "axis", -1, counts=True)],
    "com.microsoft.CropAndResize": [_Lookup(2, 0)],
    "com.microsoft.EmbedLayerNormalization": [_Lookup(0, 2), _Lookup(1, 4), _Lookup(8, 3)],
    "com.microsoft.GatherBlockQuantized": [_Lookup(1, 0, "gather_axis")],
    "com.microsoft.QEmbedLayerNormalization": [_Lookup(0, 2), _Lookup(1, 4)],
    "com.microsoft.RotaryEmbedding": [_Lookup(1, 2)],
}


class IndexBounds:
    """Exclusive upper bounds of the indices that the nodes of a graph accept."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph

    def of(self, node: ir.Node, index: int) -> list[int | Axis]:
        """Return the bounds of an operand: numbers, and axes of inputs; empty if it is no index."""
        if node.op_type == "OneHot":
            depth = constant(node.inputs[1]) if index == 0 else None
            return [] if depth is None else [int(depth.reshape(-1)[0])]
        return [
            size + more if isinstance(size, int) else (*size, more)
            for table, axis, more in _places(node, index)
            if (size := self._size(node.inputs[table], axis)) is not None
        ]

    def _size(self, table: ir.Value | None, axis: int) -> int | tuple[str, int] | None:
        """Return the size of an axis: a number, an axis of an input with the same size, or None."""
        if table is None:
            return None
        if (tensor := ir.convenience.get_const_tensor(table)) is not None:
            shape = tensor.shape.numpy()
            return int(shape[axis]) if -len(shape) <= axis < len(shape) else None
        size: int | tuple[str, int] | None = static_size(table, axis)
        node = table.producer()
        if size is None and node is not None and node.op_type in _UNPACKED:
            size = self._size(node.inputs[0], axis)
        return self._inferred(table, axis) if size is None else size

    def _inferred(self, table: ir.Value, axis: int) -> int | tuple[str, int] | None:
        shape = self._shapes.symbolic(table)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        size = shape[axis]
        return size if isinstance(size, int) else self._axes.get(str(size.value))

    @cached_property
    def _shapes(self) -> ShapeFacts:
        return ShapeFacts(self._graph, decoder=False)

    @cached_property
    def _axes(self) -> dict[str, tuple[str, int]]:
        return {
            axis_name(value, axis): (str(value.name), axis)
            for value in reversed(self._graph.inputs)
            for axis in range(len(value.shape or ()))
        }


def _places(node: ir.Node, index: int) -> Iterator[tuple[int, int, int]]:
    """Yield the table and the axis that an operand indexes, and what to add to its size."""
    if node.op_type in ("GatherND", "ScatterND") and index == 1:
        yield from ((0, axis, 0) for axis in _indexed_axes(node))
    name = node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"
    for known in _LOOKUPS.get(name, ()):
        if known.index == index and known.table < len(node.inputs):
            yield known.table, int_attribute(node, known.attribute, known.axis), int(known.counts)


def _indexed_axes(node: ir.Node) -> range:
    """Return the axes that the last axis of the indices has numbers for; all, if their number is unknown."""
    table, indices = node.inputs[0], node.inputs[1]
    first = int_attribute(node, "batch_dims", 0)
    rank = len(table.shape) if table is not None and table.shape is not None else first + 1
    count = static_size(indices, -1)
    return range(first, rank if count is None else first + count)
