"""Lower quantized keys and values in front of attention to an int8 cache of GroupQueryAttention.

    Attention(q, DequantizeLinear(QuantizeLinear(k)), DequantizeLinear(QuantizeLinear(v)), past...)
        -> GroupQueryAttention(q, k, v, past as int8, ..., k_scale, v_scale)

This takes two passes around the lowering of attention. The first removes the QDQ pairs, so that the rope is
next to the attention. The second passes their scales to the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ....errors import UsageError
from ...graph.edit import MICROSOFT, add_initializer, constant, int_attribute, nodes_of, remove_unused, weight
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass

KV_CACHE_MODES = ("auto", "int8", "bfloat16", "float32")
# GroupQueryAttention's scale inputs, and the attributes that state their granularity.
_OPERANDS = ((12, "k_quant_type"), (13, "v_quant_type"))


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


class Int8CachePass(GraphPass):
    """Make every GroupQueryAttention with known scales use an int8 cache.

    Args:
        scales: the scales that ``TakeCacheScalesPass`` found.
    """

    def __init__(self, scales: CacheScales) -> None:
        super().__init__()
        self.scales = scales

    def rewrite(self, graph: ir.Graph) -> None:
        """Add the scales and attributes, and change the types of the caches."""
        for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
            caches = node.inputs[3:5]
            found = [self.scales.by_cache.get(cache) for cache in caches if cache is not None]
            tensors = [tensor for tensor in found if tensor is not None]
            if len(tensors) < 2:
                continue
            if len(node.inputs) <= _OPERANDS[-1][0]:
                node.resize_inputs(_OPERANDS[-1][0] + 1)
            for (position, attribute), tensor in zip(_OPERANDS, tensors, strict=True):
                scale = add_initializer(graph, str(tensor.name), _in_float(tensor))
                node.replace_input_with(position, scale)
                kind = "PER_CHANNEL" if math.prod(shape_of(tensor)) > 1 else "PER_TENSOR"
                node.attributes.add(ir.AttrString(attribute, kind))
            node.attributes.add(ir.AttrInt64("kv_cache_bit_width", 8))
            for value in (*caches, *node.outputs[1:3]):
                if value is not None:
                    value.type = ir.TensorType(ir.DataType.INT8)
            self.fired += 1


def _in_float(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a scale in fp32, which the kernels need in graphs of any type."""
    if tensor.dtype == ir.DataType.FLOAT:
        return tensor
    wide = lazy(lambda: tensor.numpy().astype(np.float32), ir.DataType.FLOAT, shape_of(tensor))
    wide.name = tensor.name
    return wide


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
