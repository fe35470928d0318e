"""Lower Attention without a cache to onnxruntime's MultiHeadAttention, which tiles the scores by rows.

The kernel needs a mask with a full query axis, [batch or 1, heads or 1, queries, keys]. Attentions with the
same mask share it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    replace,
    shared_constant,
)
from ...passes.base import GraphPass

_MASK = 3
_RANK = 4


class MultiHeadAttentionPass(GraphPass):
    """Lower attention on [batch, length, heads * head_dim] without grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[tuple[ir.Value, int | str], ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower every attention that the kernel can compute."""
        self._masks = {}
        for node in nodes_of(graph, "Attention"):
            reason = _misfit(node)
            if reason is not None:
                self.refuse(node, reason)
                continue
            given = node.inputs[_MASK] if len(node.inputs) > _MASK else None
            mask = (
                None if given is None else self._full_mask(graph, node, _with_four_axes(graph, node, given))
            )
            attributes: dict[str, int | float] = {"num_heads": int_attribute(node, "q_num_heads", 0)}
            if "scale" in node.attributes:
                attributes["scale"] = float_attribute(node, "scale", 0.0)
            if int_attribute(node, "is_causal", 0):
                attributes["unidirectional"] = 1
            operands = [*node.inputs[:3], *([None, None, mask] if mask is not None else [])]
            made = insert(node, "MultiHeadAttention", operands, attributes, domain=MICROSOFT)
            made.name = node.name
            replace(node.outputs[0], made.outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1

    def _full_mask(self, graph: ir.Graph, node: ir.Node, mask: ir.Value) -> ir.Value:
        """Return a mask with a full query axis, expanded if that axis has size 1."""
        shape, query = mask.shape, node.inputs[0]
        if shape is not None and shape[-2] != 1:
            return mask
        if query is None:
            raise AssertionError("unreachable: every attention has a query")
        dim = query.shape[1] if query.shape is not None else None
        length = dim if dim is None or isinstance(dim, int) else dim.value
        if length is not None and (mask, length) in self._masks:
            return self._masks[mask, length]
        made = _repeated(graph, node, mask, query)
        if length is not None:
            self._masks[mask, length] = made
        return made


def _with_four_axes(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> ir.Value:
    missing = 0 if mask.shape is None else _RANK - len(mask.shape)
    if not missing:
        return mask
    axes = shared_constant(graph, f"mask.axes_{missing}", np.arange(missing))
    wide = insert(node, "Unsqueeze", [mask, axes]).outputs[0]
    wide.type, wide.shape = mask.type, ir.Shape([*[1] * missing, *(mask.shape or [])])
    return wide


def _repeated(graph: ir.Graph, node: ir.Node, mask: ir.Value, query: ir.Value) -> ir.Value:
    ones = shared_constant(graph, "mask.ones", np.array([1, 1], np.int64))
    one = shared_constant(graph, "mask.one", np.array([1], np.int64))
    length = insert(node, "Shape", [query], {"start": 1, "end": 2}).outputs[0]
    target = insert(node, "Concat", [ones, length, one], {"axis": 0}).outputs[0]
    made = insert(node, "Expand", [mask, target]).outputs[0]
    made.type = mask.type
    return made


def _misfit(node: ir.Node) -> str | None:
    heads, kv_heads = (int_attribute(node, f"{side}_num_heads", 0) for side in ("q", "kv"))
    if not heads or heads != kv_heads:
        return "its input is 4-D, or it has grouped queries"
    if any(value is not None for value in node.inputs[4:]) or len(node.outputs) > 1:
        return "it has a cache, or more than one output"
    if float_attribute(node, "softcap", 0.0):
        return "the kernel does not support softcap"
    if node.inputs[0] is None or node.inputs[0].dtype not in (None, ir.DataType.FLOAT):
        return "the kernel computes in fp32 only"
    mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
    if mask is None:
        return None
    if mask.dtype != ir.DataType.FLOAT or mask.shape is None or not 2 <= len(mask.shape) <= _RANK:
        return "its mask is not an fp32 tensor of 2 to 4 axes"
    return None
