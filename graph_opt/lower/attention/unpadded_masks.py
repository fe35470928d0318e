"""Masks of runs of one sequence, for targets whose kernels compare no 64-bit integers.

Such runs have no padding, so products with the attention mask and conjunctions with it go. What is computed
from a ``Range`` of positions is computed in 32 bits; positions are below 2^31.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import ATTENTION_MASK
from ...graph.edit import insert, nodes_of, remove_unused, replace, shared_constant
from ...passes.base import GraphPass

_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_INTEGERS = frozenset({"Add", "Sub", "Mul", "Squeeze", "Unsqueeze"})
_INT64, _INT32 = ir.DataType.INT64, ir.DataType.INT32


class RemovePaddingPass(GraphPass):
    """Remove each product and conjunction with the attention mask, which is 1 for every token of a run."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite Mul and And."""
        for node in [*nodes_of(graph, "Mul"), *nodes_of(graph, "And")]:
            self.fired += remove_padding(graph, node)


class ShortRangesPass(GraphPass):
    """Compute ranges of positions, sums of them and comparisons in int32; shapes must be inferred."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite each Range of int64, and what reads it."""
        for node in [node for node in nodes_of(graph, "Range") if node.outputs[0].dtype == _INT64]:
            _shorten(node)
            self.fired += 1


def remove_padding(graph: ir.Graph, node: ir.Node) -> bool:
    """Remove a node if one of its two operands comes from the attention mask; return whether it does."""
    for x, factor in (node.inputs[:2], node.inputs[1::-1]):
        while factor is not None and (source := factor.producer()) is not None:
            if source.op_type not in ("Cast", "Slice", "Unsqueeze"):
                break
            factor = source.inputs[0]
        if x is not None and factor is not None and factor.name == ATTENTION_MASK and factor.is_graph_input():
            replace(node.outputs[0], _of_rank(graph, node, x))
            remove_unused(graph, node)
            return True
    return False


def _of_rank(graph: ir.Graph, node: ir.Node, x: ir.Value) -> ir.Value:
    """Return an operand of a node with the rank of its result."""
    lacking = len(node.outputs[0].shape or ()) - len(x.shape or ())
    if x.shape is None or lacking <= 0:
        return x
    axes = shared_constant(graph, f"axes.{lacking}", np.arange(lacking))
    widened = insert(node, "Unsqueeze", [x, axes]).outputs[0]
    widened.type, widened.shape = x.type, ir.Shape([1] * lacking + list(x.shape))
    return widened


def _shorten(first: ir.Node) -> None:
    """Let a node and its readers compute in int32; other readers get the result as int64 again."""
    stack = [first]
    while stack:
        node = stack.pop()
        data = 1 if node.op_type in ("Squeeze", "Unsqueeze") else len(node.inputs)
        for index, value in enumerate(node.inputs[:data]):
            if value is not None and value.dtype == _INT64:
                short = insert(node, "Cast", [value], {"to": int(_INT32)}).outputs[0]
                short.type, short.shape = ir.TensorType(_INT32), value.shape
                node.replace_input_with(index, short)
        if node.op_type in _COMPARISONS:
            continue
        out = node.outputs[0]
        out.type = ir.TensorType(_INT32)
        for use in list(out.uses()):
            if use.node.op_type in _COMPARISONS | _INTEGERS:
                stack.append(use.node)
            elif use.node.op_type != "Cast":
                wide = insert(use.node, "Cast", [out], {"to": int(_INT64)}).outputs[0]
                wide.type, wide.shape = ir.TensorType(_INT64), out.shape
                use.node.replace_input_with(use.idx, wide)
