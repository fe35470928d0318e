"""Fuse Norm(Add(a, b)) into com.microsoft Skip(Simplified)LayerNormalization, which also returns the sum.

The sum is the residual stream, which the next layer reads.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ...passes.base import GraphPass

_LOWERED = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}


class SkipNormPass(GraphPass):
    """Fuse a residual addition with the norm behind it."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every norm of a sum."""
        for op_type in _LOWERED:
            for node in nodes_of(graph, op_type):
                total = node.inputs[0]
                add = total.producer() if total is not None else None
                if add is None or add.op_type != "Add":
                    continue
                reason = _misfit(node, add)
                if reason is not None:
                    self.refuse(node, reason)
                    continue
                _lower(graph, node, add)
                self.fired += 1


def _misfit(node: ir.Node, add: ir.Node) -> str | None:
    left, right = add.inputs
    if left is None or right is None or any(weight(value) is not None for value in (left, right)):
        return "it adds a weight"
    if left.shape is None or left.shape != right.shape:
        return f"the summands' shapes {left.shape} and {right.shape} must be known and equal"
    if int_attribute(node, "axis", -1) not in (-1, len(left.shape) - 1):
        return "it normalises other axes than the last"
    scale = weight(node.inputs[1])
    if scale is None or len(scale.shape) != 1:
        return "its scale is not a vector"
    return "its mean or variance output is used" if any(out.uses() for out in node.outputs[1:]) else None


def _lower(graph: ir.Graph, node: ir.Node, add: ir.Node) -> None:
    attributes = {"epsilon": float_attribute(node, "epsilon", 1e-5)}
    summands, bias, added = _without_bias(add)
    vectors = [*node.inputs[1:], None][: 2 if node.op_type == "LayerNormalization" else 1]
    operands = [*summands, *vectors, *([bias] if bias is not None else [])]
    fused = insert(add, _LOWERED[node.op_type], operands, attributes, domain=MICROSOFT, num_outputs=4)
    fused.name = node.name
    for unused in fused.outputs[1:3]:
        unused.name = ""
    replace(node.outputs[0], fused.outputs[0])
    graph.remove(node, safe=True)
    replace(add.outputs[0], fused.outputs[3])
    graph.remove(add, safe=True)
    remove_unused(graph, added)


def _without_bias(add: ir.Node) -> tuple[list[ir.Value | None], ir.Value | None, ir.Node | None]:
    """Return the summands without a bias added to one of them, the bias, and the Add of that bias."""
    for index, summand in enumerate(add.inputs):
        inner = summand.producer() if summand is not None else None
        if (
            inner is None
            or inner.op_type != "Add"
            or inner.domain
            or sole_consumer(inner.outputs[0]) is not add
        ):
            continue
        for x, bias in (inner.inputs, inner.inputs[::-1]):
            tensor = weight(bias)
            if tensor is not None and len(tensor.shape) == 1 and weight(x) is None:
                others = list(add.inputs)
                others[index] = x
                return others, bias, inner
    return list(add.inputs), None, None
