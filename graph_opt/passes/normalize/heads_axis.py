"""Compute products of [batch * heads, rows, columns] as products of [batch, heads, rows, columns].

Traces of ``torch.bmm`` merge the first two axes of q, k and v by a Reshape, and split those of the scores and
of the result by another:

    Reshape(MatMul(Reshape(a), Transpose(Reshape(b))))  ->  MatMul(a, Transpose(b))
    Reshape(MatMul(Softmax(Reshape(a)), Reshape(b)))    ->  MatMul(Softmax(a), b)

A Reshape whose last two axes are those of its source only merges or splits the axes in front of them.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ...graph.edit import certainly_equal, insert, int_attribute, nodes_of, remove_unused, replace
from ..base import GraphPass

_SWAPPED = [0, 2, 1]
_ON_FOUR_AXES: dict[str, dict[str, Any]] = {
    "Softmax": {"axis": -1},
    "Transpose": {"perm": [0, 1, 3, 2]},
    "MatMul": {},
}


class HeadsAxisPass(GraphPass):
    """Compute products between a merging and a splitting Reshape on four axes."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Reshape that splits the first axis of three."""
        for node in list(nodes_of(graph, "Reshape")):
            merged, split = node.inputs[0], node.outputs[0]
            if merged is None or merged.shape is None or len(merged.shape) != 3 or merged.is_graph_output():
                continue
            shape = _split_shape(merged)
            if shape is None or _is_merge(merged) or not certainly_equal(shape, split.shape):
                continue
            replace(split, _write(node, merged))
            remove_unused(graph, node)
            self.fired += 1


def _split_shape(value: ir.Value | None) -> ir.Shape | None:
    """Return the shape [batch, heads, rows, columns] of a value [batch * heads, rows, columns], if known."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.domain or not node.inputs:
        return None
    if _is_merge(value):
        source = node.inputs[0]
        return source.shape if source is not None else None
    first = _split_shape(node.inputs[0])
    if first is None:
        return None
    match node.op_type:
        case "Softmax" if int_attribute(node, "axis", -1) in (-1, 2):
            return first
        case "Transpose" if "perm" in node.attributes and list(node.attributes["perm"].as_ints()) == _SWAPPED:
            return ir.Shape([first[0], first[1], first[3], first[2]])
        case "MatMul":
            second = _split_shape(node.inputs[1])
            if second is None or not certainly_equal(ir.Shape(first[:2]), ir.Shape(second[:2])):
                return None
            return ir.Shape([*first[:3], second[3]])
    return None


def _is_merge(value: ir.Value) -> bool:
    """Return whether a value is a Reshape of [batch, heads, rows, columns] to [batch * heads, ...]."""
    node = value.producer()
    if node is None or node.domain or node.op_type != "Reshape" or node.inputs[0] is None:
        return False
    old, new = node.inputs[0].shape, value.shape
    if old is None or new is None or (len(old), len(new)) != (4, 3):
        return False
    return certainly_equal(ir.Shape(old[2:]), ir.Shape(new[1:]))


def _write(before: ir.Node, value: ir.Value) -> ir.Value:
    """Write ``value`` on four axes; ``_split_shape`` knows its shape."""
    node = value.producer()
    if node is None or node.inputs[0] is None:
        raise AssertionError("unreachable: the shape of four axes is known")
    if _is_merge(value):
        return node.inputs[0]
    operands = [_write(before, operand) for operand in node.inputs if operand is not None]
    written = insert(before, node.op_type, operands, _ON_FOUR_AXES[node.op_type]).outputs[0]
    written.shape, written.type = _split_shape(value), value.type
    return written
