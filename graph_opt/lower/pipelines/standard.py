"""Lower to old standard operators and QDQ with explicit KV, for TensorRT's parser of any version 10.

    Attention        -> MatMul, Softmax in fp32, MatMul, on repeated KV heads
    RotaryEmbedding  -> Mul, Sub, Add, Concat
    RMSNormalization -> see ``older_opset.py``

The parser supports Attention since TensorRT 10.14 (release notes of onnx-tensorrt). TensorRT recognises and
fuses the decomposed attention itself.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    replace,
    shared_constant,
    static_size,
)
from ...passes.base import GraphPass
from ...passes.normalize.float_compute import FloatComputePass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ...passes.shape_inference import ShapeInferencePass
from ...quantize.formats.half import HalfPrecisionPass
from ..attention.rope_tables import RopeTablesPass
from ..attention.shared_cache import SharedCachePass
from ..older_opset import DecomposeNormsPass, OlderOpsetPass
from ..products.block_minima import SplitMinimaPass
from ..products.dequantize_weights import DequantizeWeightsPass, is_signed
from ..products.float8_weights import Float8WeightsPass
from ..products.weight_only_products import WeightOnlyProductsPass
from ..require_dynamic_sequence import RequireDynamicSequencePass
from ..token_range import TokenRangePass

OPSET = 21


class DecomposeRotaryPass(GraphPass):
    """Decompose every RotaryEmbedding whose angles are [batch, sequence, rotary_dim / 2]."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite nodes on [batch, sequence, heads * head_dim]."""
        for node in nodes_of(graph, "RotaryEmbedding"):
            heads, width = int_attribute(node, "num_heads", 0), static_size(node.inputs[0], 2)
            if len(node.inputs) > 3 or not heads or width is None:
                self.refuse(node, "its angles are a table, its input is 4-D, or its width is unknown")
                continue
            replace(node.outputs[0], _rotated(_Writer(graph, node), node, heads, width // heads))
            graph.remove(node, safe=True)
            self.fired += 1


class DecomposeAttentionPass(GraphPass):
    """Decompose every Attention with explicit KV and an additive mask."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite attention on [batch, sequence, heads * head_dim]."""
        for node in nodes_of(graph, "Attention"):
            inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
            heads, groups = int_attribute(node, "q_num_heads", 0), int_attribute(node, "kv_num_heads", 0)
            if inputs[3] is None or inputs[4] is None or inputs[6] is not None or not heads or not groups:
                self.refuse(node, "it has no mask, no KV cache, or a 4-D input")
                continue
            _attend(_Writer(graph, node), node, heads, groups)
            graph.remove(node, safe=True)
            self.fired += 1


def standard_passes(
    context_length: int, compute: ir.DataType | None = None, *, int4: bool = False
) -> list[ir.passes.PassBase]:
    """Return the passes in order. The graph keeps the portable contract, in operators of opset 21.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        compute: FLOAT16 or BFLOAT16 to convert a float graph to it; None to convert 16-bit graphs to fp32.
        int4: whether the target supports DequantizeLinear of int4 weights in addition to int8.
    """
    types = (ir.DataType.INT8, ir.DataType.INT4) if int4 else (ir.DataType.INT8,)
    return [
        RequireDynamicSequencePass(),
        Float8WeightsPass(),
        WeightOnlyProductsPass(static=False),
        SplitMinimaPass(),
        FloatComputePass() if compute is None else HalfPrecisionPass(compute),
        ShapeInferencePass(),
        TokenRangePass(),
        RopeTablesPass(context_length),
        RemoveUnusedNodesPass(),
        SharedCachePass(),
        DecomposeRotaryPass(),
        DecomposeAttentionPass(),
        ShapeInferencePass(),
        DecomposeNormsPass(),
        DequantizeWeightsPass(unless=lambda node: is_signed(node, types)),
        RemoveUnusedNodesPass(),
        OlderOpsetPass(OPSET),
    ]


class _Writer:
    """Inserts nodes in front of ``node``."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node

    def op(self, op_type: str, *operands: ir.Value | None, **attributes: object) -> ir.Value:
        return insert(self.node, op_type, operands, attributes).outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        name = "standard.ints_" + "_".join(map(str, numbers))
        return shared_constant(self.graph, name, np.array(numbers, np.int64))

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        content = np.array(value, dtype.numpy())
        return shared_constant(self.graph, f"standard.{dtype.name.lower()}_{value:g}", content)

    def heads(self, value: ir.Value | None, count: int) -> ir.Value:
        """Convert [batch, sequence, heads * size] into [batch, heads, sequence, size]."""
        split = self.op("Reshape", value, self.ints(0, 0, count, -1))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])


def _rotated(write: _Writer, node: ir.Node, heads: int, size: int) -> ir.Value:
    rotary = int_attribute(node, "rotary_embedding_dim", 0) or size
    four = write.op("Reshape", node.inputs[0], write.ints(0, 0, heads, size))
    # Tables are [batch, sequence, rotary / 2], equal for all heads. Pairs are neighbours (interleaved) or
    # the same places of both halves; either way a Slice takes the first and the second of all pairs.
    cos, sin = (write.op("Unsqueeze", angle, write.ints(2)) for angle in node.inputs[1:3])
    turned, rest = four, None
    if rotary < size:
        turned = write.op("Slice", four, write.ints(0), write.ints(rotary), write.ints(3))
        rest = write.op("Slice", four, write.ints(rotary), write.ints(size), write.ints(3))
    interleaved = bool(int_attribute(node, "interleaved", 0))
    step = 2 if interleaved else 1
    starts = (0, 1) if interleaved else (0, rotary // 2)
    ends = (rotary, rotary) if interleaved else (rotary // 2, rotary)
    first, second = (
        write.op("Slice", turned, write.ints(start), write.ints(end), write.ints(3), write.ints(step))
        for start, end in zip(starts, ends, strict=True)
    )
    real = write.op("Sub", write.op("Mul", first, cos), write.op("Mul", second, sin))
    imaginary = write.op("Add", write.op("Mul", first, sin), write.op("Mul", second, cos))
    if interleaved:
        parts = [write.op("Unsqueeze", part, write.ints(4)) for part in (real, imaginary)]
        joined = write.op("Reshape", write.op("Concat", *parts, axis=4), write.ints(0, 0, heads, rotary))
    else:
        joined = write.op("Concat", real, imaginary, axis=3)
    if rest is not None:
        joined = write.op("Concat", joined, rest, axis=3)
    return write.op("Reshape", joined, write.ints(0, 0, heads * size))


def _attend(write: _Writer, node: ir.Node, heads: int, groups: int) -> None:
    query, key, value, mask, past_key, past_value = node.inputs[:6]
    size, dtype = static_size(past_key, 3) or 1, (past_key and past_key.dtype) or ir.DataType.FLOAT
    keys = write.op("Concat", past_key, write.heads(key, groups), axis=2)
    values = write.op("Concat", past_value, write.heads(value, groups), axis=2)
    scale = float_attribute(node, "scale", size**-0.5)
    scaled = write.op("Mul", write.heads(query, heads), write.number(scale, dtype))
    transposed = write.op("Transpose", _repeated(write, keys, heads, groups, size), perm=[0, 1, 3, 2])
    scores = write.op("MatMul", scaled, transposed)
    wide = write.op("Cast", scores, to=int(ir.DataType.FLOAT))
    if cap := float_attribute(node, "softcap", 0.0):
        bound = write.number(cap, ir.DataType.FLOAT)
        wide = write.op("Mul", write.op("Tanh", write.op("Div", wide, bound)), bound)
    masked = write.op("Add", wide, write.op("Cast", mask, to=int(ir.DataType.FLOAT)))
    weights = write.op("Cast", write.op("Softmax", masked, axis=-1), to=int(dtype))
    attended = write.op("MatMul", weights, _repeated(write, values, heads, groups, size))
    joined = write.op("Transpose", attended, perm=[0, 2, 1, 3])
    result = write.op("Reshape", joined, write.ints(0, 0, heads * size))
    for old, new in zip(node.outputs, (result, keys, values), strict=False):
        replace(old, new)


def _repeated(write: _Writer, value: ir.Value, heads: int, groups: int, size: int) -> ir.Value:
    """Repeat [batch, kv_heads, total, size] to [batch, heads, total, size]."""
    if heads == groups:
        return value
    shape = write.ints(1, 1, heads // groups, 1, 1)
    wide = write.op("Expand", write.op("Unsqueeze", value, write.ints(2)), shape)
    return write.op("Reshape", wide, write.op("Concat", *_sizes(write, value, heads, size), axis=0))


def _sizes(write: _Writer, value: ir.Value, heads: int, size: int) -> list[ir.Value]:
    batch = write.op("Shape", value, start=0, end=1)
    total = write.op("Shape", value, start=2, end=3)
    return [batch, write.ints(heads), total, write.ints(size)]
