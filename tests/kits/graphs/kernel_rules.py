"""What kernels require of attributes and shapes, which their registrations do not show.

Each rule returns why the kernel refuses a node, or computes it wrongly; None if neither.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from kernel_table import Rule, attribute

from carryall.graph_opt.graph.edit import static_size

_Q_NORM = 14


def _needs_cudnn(node: ir.Node) -> str | None:
    return "it needs cuDNN, which decoders run without"


def _nbits(node: ir.Node) -> str | None:
    block, bits = attribute(node, "block_size"), attribute(node, "bits")
    if bits not in (2, 4, 8):
        return f"{bits} bits"
    return None if block >= 16 and not block & (block - 1) else f"blocks of {block}"


def _attention(node: ir.Node) -> str | None:
    size = static_size(node.inputs[3], 3) or 0
    return f"a head size of {size} is not divisible by 8" if size % 8 else None


def _cuda_attention(node: ir.Node) -> str | None:
    cache, norms = node.inputs[3], len(node.inputs) > _Q_NORM
    int8 = cache is not None and cache.dtype == ir.DataType.INT8
    if int8 and (norms or any(value is None for value in node.inputs[12:14])):
        return "an int8 cache needs scales, and has no fused kernel with norms of q and k"
    return _attention(node)


def _webgpu_attention(node: ir.Node) -> str | None:
    if attribute(node, "softcap", 0.0):
        return "softcap is ignored"
    if len(node.inputs) > _Q_NORM and node.inputs[1] is None:
        return "norms of packed q and k are refused"
    if any(value is not None for value in (*node.inputs[9:10], *node.inputs[12:14])):
        return "position_ids and scales are ignored"
    return _attention(node)


def _webgpu_gather(node: ir.Node) -> str | None:
    has_points = len(node.inputs) > 3 and node.inputs[3] is not None
    refused = has_points and attribute(node, "bits") == 4
    return "one zero point of 4 bits per byte is refused" if refused else None


def _cuda_experts(node: ir.Node) -> str | None:
    hidden = static_size(node.inputs[0], -1) or 0
    return f"a hidden size of {hidden} is not divisible by 64" if hidden % 64 else None


CUDA: Mapping[str, Rule] = {
    **dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceProd", "Conv"), _needs_cudnn),
    "com.microsoft.GroupQueryAttention": _cuda_attention,
    "com.microsoft.MatMulNBits": _nbits,
    "com.microsoft.QMoE": _cuda_experts,
}
WEBGPU: Mapping[str, Rule] = {
    "com.microsoft.GroupQueryAttention": _webgpu_attention,
    "com.microsoft.MatMulNBits": _nbits,
    "com.microsoft.GatherBlockQuantized": _webgpu_gather,
}
CPU: Mapping[str, Rule] = {
    "com.microsoft.GroupQueryAttention": _attention,
    "com.microsoft.MatMulNBits": _nbits,
}
