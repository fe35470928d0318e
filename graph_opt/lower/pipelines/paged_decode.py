"""Give paged attention to carryall's ``PagedDecode`` on CUDA, made for steps of one token a row."""

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
    static_size,
)
from ...passes.base import GraphPass
from .paged_form import DOMAIN

_MOST_GROUP, _LARGEST, _MULTIPLE = 4, 256, 8  # query heads of a KV head; elements of a head
_CACHES = {ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN}  # others are of the type of the query
_HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_SLOT_MAPPING = 10
_OF_THE_QUERY = (0, 8, 9, 11, 12, 13)  # inputs of its type


class PagedDecodePass(GraphPass):
    """Rewrite ``PagedAttention`` of com.microsoft with packed operands; see ``providers/cuda``.

    With more than 4 query heads of a KV head, products count more than bytes, and onnxruntime's kernel has
    tensor cores for them.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every PagedAttention."""
        for node in nodes_of(graph, "PagedAttention", MICROSOFT):
            if reason := _misfit(node):
                self.refuse(node, reason)
                continue
            kinds = node.attributes.get("k_quant_type")
            names = ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved")
            attributes = {
                **{name: int_attribute(node, name, 0) for name in names},
                "local_window_size": int_attribute(node, "local_window_size", -1),
                "scale": float_attribute(node, "scale", 0.0),
                "softcap": float_attribute(node, "softcap", 0.0),
                "qk_norm_epsilon": float_attribute(node, "qk_norm_epsilon", 1e-6),
                "channels": int(kinds is not None and kinds.as_string() == "PER_CHANNEL"),
            }
            operands = list(node.inputs)
            lowered = insert(node, "PagedDecode", operands, attributes, domain=DOMAIN, num_outputs=4)
            lowered.name = node.name
            for old, new in zip(node.outputs, lowered.outputs, strict=False):
                replace(old, new)
            remove_unused(graph, node)
            self.fired += 1


def _misfit(node: ir.Node) -> str | None:
    """Return why the kernel cannot compute an attention; None if it can."""
    if any(value is not None for value in node.inputs[1:3]):
        return "the kernel reads packed query, key and value only"
    if len(node.inputs) > _SLOT_MAPPING and node.inputs[_SLOT_MAPPING] is not None:
        return "the kernel has no slot mapping"
    typed = [node.inputs[index] for index in _OF_THE_QUERY if index < len(node.inputs)]
    types = {value.dtype for value in typed if value is not None and value.dtype is not None}
    if cache := node.inputs[3]:
        types |= {cache.dtype} - {*_CACHES, None}  # type: ignore[arg-type]
    if len(types) != 1 or not types <= _HALVES:
        return "the kernel computes in float16 or bfloat16 only"
    heads, kv_heads = int_attribute(node, "num_heads", 0), int_attribute(node, "kv_num_heads", 1)
    if heads > _MOST_GROUP * kv_heads:
        return f"the kernel is made for {_MOST_GROUP} query heads of a KV head, not {heads // kv_heads}"
    size = static_size(node.inputs[3], 3)
    if size is None or size > _LARGEST or size % _MULTIPLE or size != static_size(node.inputs[4], 3):
        return f"the kernel does not read heads of {size}"
    if float_attribute(node, "scale", 0.0) == 0:
        return "the scale is not stated"
    return None
