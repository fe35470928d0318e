"""Lower quantized keys and values in front of attention to a cache of 8 bits of onnxruntime's operators.

    Attention(q, DequantizeLinear(QuantizeLinear(k)), DequantizeLinear(QuantizeLinear(v)), past...)
        -> GroupQueryAttention or PagedAttention(q, k, v, past as int8, ..., k_scale, v_scale)

A cache of float8e4m3fn has the same scales, so that what an int8 cache holds at most is the largest number of
that type too. This takes two passes around the lowering of attention. The first removes the QDQ pairs, so
that the rope is next to the attention. The second passes their scales to the kernel.
"""

from __future__ import annotations

import math
from dataclasses import field

import numpy as np
import onnx_ir as ir

from ....errors import UsageError
from ....records import dataclass
from ...graph.edit import MICROSOFT, add_initializer, constant, int_attribute, nodes_of, remove_unused, weight
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass

INT8, FP8 = "int8", "fp8"  # caches of 8 bits
KV_CACHE_MODES = ("auto", INT8, FP8, "bfloat16", "float32")
# The inputs of the scales of keys and values, and the attributes that state their granularity. Sources:
# onnxruntime 1.31, docs/ContribOperators.md; docs/contrib_ops/cuda/paged_attention.md: the shape of a scale.
_OPERANDS = {"GroupQueryAttention": (12, 13), "PagedAttention": (14, 15)}
_KINDS = ("k_quant_type", "v_quant_type")
_TYPES = {INT8: ir.DataType.INT8, FP8: ir.DataType.FLOAT8E4M3FN}
_FP8_FACTOR = 127 / 448  # from the scale for int8 to that for float8e4m3fn


@dataclass(slots=True)
class CacheScales:
    """Scales by cache input, handed from the first pass to the second."""

    by_cache: dict[ir.Value, ir.TensorProtocol] = field(default_factory=dict)


class TakeCacheScalesPass(GraphPass):
    """Remove QDQ pairs from attention's keys and values; scales may be per tensor or per channel.

    Args:
        found: filled with the scales.
        required: whether the caller requires a quantized cache.

    Raises:
        UsageError: a quantized cache is required, and the graph has no scales.
    """

    def __init__(self, found: CacheScales, *, required: bool) -> None:
        super().__init__()
        self.found = found
        self.required = required

    def rewrite(self, graph: ir.Graph) -> None:
        """Reconnect every attention whose key and value are both quantized."""
        self.found.by_cache.clear()
        for node in nodes_of(graph, "Attention"):
            pairs = [_quantized(value) for value in node.inputs[1:3]]
            caches = node.inputs[4:6]
            if len(caches) < 2 or any(pair is None for pair in pairs):
                continue
            for position, (pair, cache) in enumerate(zip(pairs, caches, strict=True), start=1):
                if pair is None or cache is None:
                    continue
                old = node.inputs[position]
                node.replace_input_with(position, pair[0])
                self.found.by_cache[cache] = pair[1]
                remove_unused(graph, old.producer() if old is not None else None)
            self.fired += 1
        if self.required and not self.fired:
            raise UsageError(
                "the model has no scales for an int8 KV cache; "
                "measure them with: carryall quantize IN OUT --method none --kv int8"
            )


class QuantizedCachePass(GraphPass):
    """Make every attention of com.microsoft with known scales use a cache of 8 bits.

    Args:
        scales: the scales that ``TakeCacheScalesPass`` found.
        kind: ``INT8`` or ``FP8``.
    """

    def __init__(self, scales: CacheScales, kind: str = INT8) -> None:
        super().__init__()
        self.scales, self.kind = scales, kind

    def rewrite(self, graph: ir.Graph) -> None:
        """Add the scales and attributes, and change the types of the caches."""
        for node in [node for kind in _OPERANDS for node in nodes_of(graph, kind, MICROSOFT)]:
            places = _OPERANDS[node.op_type]
            caches = node.inputs[3:5]
            found = [self.scales.by_cache.get(cache) for cache in caches if cache is not None]
            tensors = [tensor for tensor in found if tensor is not None]
            if len(tensors) < 2:
                continue
            if len(node.inputs) <= places[-1]:
                node.resize_inputs(places[-1] + 1)
            heads = int_attribute(node, "kv_num_heads", 1)
            for place, attribute, tensor in zip(places, _KINDS, tensors, strict=True):
                channels = math.prod(shape_of(tensor))
                shape = (heads, 1, channels // heads) if channels > 1 else (1,)
                scale = add_initializer(graph, str(tensor.name), self._scale(tensor, shape))
                node.replace_input_with(place, scale)
                kind = "PER_CHANNEL" if channels > 1 else "PER_TENSOR"
                node.attributes.add(ir.AttrString(attribute, kind))
            if node.op_type == "GroupQueryAttention":  # PagedAttention reads it from the cache's type
                node.attributes.add(ir.AttrInt64("kv_cache_bit_width", 8))
            for value in (*caches, *node.outputs[1:3]):
                if value is not None:
                    value.type = ir.TensorType(_TYPES[self.kind])
            self.fired += 1

    def _scale(self, tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> ir.TensorProtocol:
        """Return a scale in fp32, which the kernels need in graphs of any type."""
        factor = np.float32(_FP8_FACTOR if self.kind == FP8 else 1)
        scale = lazy(
            lambda: tensor.numpy().astype(np.float32).reshape(shape) * factor, ir.DataType.FLOAT, shape
        )
        scale.name = tensor.name
        return scale


def _quantized(value: ir.Value | None) -> tuple[ir.Value, ir.TensorProtocol] | None:
    """Return x and the scale of DequantizeLinear(QuantizeLinear(x)) if the kernel supports it, else None."""
    last = value.producer() if value is not None else None
    if last is None or last.op_type != "DequantizeLinear" or last.inputs[0] is None:
        return None
    first = last.inputs[0].producer()
    if first is None or first.op_type != "QuantizeLinear" or list(first.inputs[1:]) != list(last.inputs[1:]):
        return None
    x, tensor = first.inputs[0], weight(first.inputs[1])
    zero = constant(first.inputs[2]) if len(first.inputs) > 2 else None
    if x is None or tensor is None or zero is None or zero.dtype != np.int8 or zero.any():
        return None
    per_channel = len(shape_of(tensor)) == 1 and int_attribute(first, "axis", 1) in (2, -1)
    return (x, tensor) if per_channel or shape_of(tensor) in ((), (1,)) else None
