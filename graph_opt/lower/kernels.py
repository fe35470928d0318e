"""What a target's own kernels can take: the facts that decide between lowered forms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The abilities of one execution provider. Add a fact here, never a test of a provider's name.

    Args:
        rotary_in_attention: GroupQueryAttention applies the rotary embedding itself.
        packed_qkv: GroupQueryAttention takes q, k and v as one tensor.
        skip_norm: SkipSimplifiedLayerNormalization and SkipLayerNormalization exist and pay off.
        quick_gelu: QuickGelu is faster than Sigmoid and Mul.
        matmul_nbits: MatMulNBits exists for these weight widths.
        accuracy_level: MatMulNBits' ``accuracy_level``; 4 computes in int8, 1 in fp32, 0 leaves it unset.
        gather_block_quantized: GatherBlockQuantized exists.
        dynamic_quantize_matmul: DynamicQuantizeMatMul exists.
        int8_kv: GroupQueryAttention keeps an int8 cache.
        half_precision: fp16 and bf16 graphs are computed as they are; else they are widened to fp32.
    """

    rotary_in_attention: bool = True
    packed_qkv: bool = True
    skip_norm: bool = True
    quick_gelu: bool = True
    matmul_nbits: tuple[int, ...] = (4, 8)
    accuracy_level: int = 4
    gather_block_quantized: bool = True
    dynamic_quantize_matmul: bool = True
    int8_kv: bool = True
    half_precision: bool = False


CPU = Kernels()
