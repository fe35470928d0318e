"""The standard operators with recurrent states, of opset 27, as those that onnxruntime has kernels for."""

from __future__ import annotations

import onnx_ir as ir

from .edit import MICROSOFT

# The attributes of the standard's operators.
ATTRIBUTES = {
    "LinearAttention": frozenset({"chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"}),
    "CausalConvWithState": frozenset({"activation"}),
}


def use_microsoft_states(graph: ir.Graph) -> int:
    """Replace these operators by equal ones of com.microsoft; return their number."""
    nodes = [node for node in graph.all_nodes() if node.op_type in ATTRIBUTES and not node.domain]
    for node in nodes:
        node.domain, node.version = MICROSOFT, None
    if nodes:
        graph.opset_imports.setdefault(MICROSOFT, 1)
    return len(nodes)
