"""Replace onnxruntime's norm operators by standard ones, and separate fused residual additions."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import MICROSOFT, float_attribute, insert, remove_unused, replace
from ..base import GraphPass

_SKIP = {
    "SkipSimplifiedLayerNormalization": "RMSNormalization",
    "SkipLayerNormalization": "LayerNormalization",
}
_SUM = 3  # index of the output with the residual sum
_EPSILON = 1e-12  # default epsilon of the skip norms


class LiftNormsPass(GraphPass):
    """Replace SimplifiedLayerNormalization and the skip norms."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every node whose mean and variance outputs are not used."""
        for node in list(graph):
            if node.op_type in _SKIP and node.domain == MICROSOFT:
                reason = _lift_skip(graph, node)
            elif node.op_type == "SimplifiedLayerNormalization" and node.domain in ("", MICROSOFT):
                reason = _lift(graph, node)
            else:
                continue
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)


def _lift(graph: ir.Graph, node: ir.Node) -> str | None:
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or variance output is used"
    attributes = {
        name: node.attributes[name].value for name in ("axis", "epsilon") if name in node.attributes
    }
    normed = insert(node, "RMSNormalization", node.inputs[:2], attributes)
    normed.name = node.name
    replace(node.outputs[0], normed.outputs[0])
    remove_unused(graph, node)
    return None


def _lift_skip(graph: ir.Graph, node: ir.Node) -> str | None:
    op_type = _SKIP[node.op_type]
    vectors = 2 if op_type == "LayerNormalization" else 1  # scale and beta, or scale; the bias follows
    operands = [*node.inputs, *[None] * 5]
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:_SUM]):
        return "its mean or variance output is used"
    left, right, bias = operands[0], operands[1], operands[2 + vectors]
    if left is None or right is None or (left.shape is None) or left.shape != (right.shape or left.shape):
        return "the shapes of its summands differ or are unknown"
    total = insert(node, "Add", [left, right]).outputs[0]
    if bias is not None:
        total = insert(node, "Add", [total, bias]).outputs[0]
    total.shape, total.type = left.shape, left.type
    attributes = {"axis": -1, "epsilon": float_attribute(node, "epsilon", _EPSILON)}
    normed = insert(node, op_type, [total, *operands[2 : 2 + vectors]], attributes)
    normed.name = node.name
    replace(node.outputs[0], normed.outputs[0])
    if len(node.outputs) > _SUM:
        replace(node.outputs[_SUM], total)
    remove_unused(graph, node)
    return None
