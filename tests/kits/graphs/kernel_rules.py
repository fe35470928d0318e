"""What kernels require of attributes and shapes, which their registrations do not show.

Each rule returns why the kernel refuses a node, or computes it wrongly; None if neither.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from kernel_table import Rule, attribute, is_constant

from carryall.graph_opt.graph.edit import constant, static_size

_COS, _Q_NORM = 7, 14


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


def _directml_attention(node: ir.Node) -> str | None:
    ignored = [name for name in ("do_rotary", "softcap") if attribute(node, name)]
    if attribute(node, "local_window_size", -1) != -1:
        ignored.append("local_window_size")
    if ignored:
        return f"{', '.join(ignored)} is ignored"
    if node.inputs[1] is None or len(node.inputs) > _COS:
        return "packed q, k and v, and inputs from cos_cache on, are not read"
    return None


def _directml_nbits(node: ir.Node) -> str | None:
    operands, depth = len(node.inputs), attribute(node, "K")
    if operands != 4:
        return f"{operands} inputs, not 4"
    if depth % attribute(node, "block_size"):
        return f"rows of {depth} are not whole blocks"
    return None if attribute(node, "bits") in (4, 8) else f"{attribute(node, 'bits')} bits"


def _constant_inputs(*indices: int) -> Rule:
    """Return a rule: these inputs are known when the graph is loaded."""

    def rule(node: ir.Node) -> str | None:
        given = {index: node.inputs[index] for index in indices if index < len(node.inputs)}
        computed = [index for index, value in given.items() if not is_constant(value)]
        return f"input {computed[0]} is computed" if computed else None

    return rule


def _no_zero_point(node: ir.Node) -> str | None:
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None
    points = constant(value)
    return "zero points other than 0" if points is None or points.any() else None


def _tensorrt_topk(node: ir.Node) -> str | None:
    count = constant(node.inputs[1]) if node.inputs[1] is not None else None
    if not attribute(node, "sorted", 1):
        return "results that are not sorted"
    return None if count is None or int(count.max()) < 3840 else f"{int(count.max())} results"


def _one_output(node: ir.Node) -> str | None:
    return "more than one output" if any(value.uses() for value in node.outputs[1:]) else None


def _no_reduction(node: ir.Node) -> str | None:
    return "a reduction" if attribute(node, "reduction", "none") != "none" else None


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
# onnxruntime's DmlExecutionProvider/src/Operators: see ``DIRECTML`` in graph_opt/lower/kernels.py.
DIRECTML: Mapping[str, Rule] = {
    "com.microsoft.GroupQueryAttention": _directml_attention,
    "com.microsoft.MatMulNBits": _directml_nbits,
}
# docs/operators.md of onnx-tensorrt 10.1, column "Restrictions".
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
TENSORRT: Mapping[str, Rule] = {
    **{f"Reduce{name}": _constant_inputs(1) for name in _REDUCTIONS},
    **dict.fromkeys(("Squeeze", "Unsqueeze", "CumSum", "OneHot"), _constant_inputs(1)),
    "Slice": _constant_inputs(3),
    "Pad": _constant_inputs(3),
    "DequantizeLinear": _no_zero_point,
    "QuantizeLinear": _no_zero_point,
    "TopK": _tensorrt_topk,
    "LayerNormalization": _one_output,
    "ScatterND": _no_reduction,
}
