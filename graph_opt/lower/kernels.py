"""What a target's own kernels can take: the facts that decide between lowered forms."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """What MoE and QMoE take, where they pay off.

    Args:
        float_weights: MoE takes float experts.
        bits: QMoE takes experts of these weight widths.
        multiple: QMoE's hidden and intermediate sizes are multiples of this.
        zero_point_block: the smallest block for which QMoE takes zero points.
        raw_weights: QMoE must be told that its weights are not in the kernel's own layout.
        router_weights: QMoE reads the experts' weights from an input, and normalises those that it computes;
            else an attribute says whether they are normalised.
    """

    float_weights: bool = False
    bits: tuple[int, ...] = ()
    multiple: int = 1
    zero_point_block: int = 16
    raw_weights: bool = False
    router_weights: bool = False


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
        matmul_integer_to_float: MatMulIntegerToFloat exists.
        int8_kv: GroupQueryAttention keeps an int8 cache.
        float_prompts: on an int8 cache, prompts run faster by the fp32 kernel on converted keys and values.
        half_types: the 16-bit types that graphs are computed in; others are widened to fp32.
        float_attention: GroupQueryAttention computes in fp32 too.
        sliding_window: GroupQueryAttention takes ``local_window_size``.
        softcap: GroupQueryAttention bounds its scores.
        norms_in_attention: GroupQueryAttention normalises the heads of q and k itself.
        experts: mixtures of experts that are one operator.
        branchwise_norms: BranchwiseRMSNorm exists, which norms heads without a reshape.
        matmul_bias: MatMulNBits adds a bias.
        matmul_zero_points: MatMulNBits wants zero points even where they are the middle of the range.
        padded_prompts: fresh prompts run together, padded on the right; not where runs are to be captured.
        dequantize_blocks: DequantizeLinear takes blocked weights of every type that graphs here have.
        position_inputs: GroupQueryAttention rotates by ``position_ids``, so that tokens may leave the cache
            while positions go on.
        multi_head_attention: MultiHeadAttention is no slower than what it is made of, in models that are no
            decoders.
        opset: the newest of the standard's opsets whose operators have kernels.
    """

    rotary_in_attention: bool = True
    packed_qkv: bool = True
    skip_norm: bool = True
    quick_gelu: bool = True
    matmul_nbits: tuple[int, ...] = (4, 8)
    accuracy_level: int = 4
    gather_block_quantized: bool = True
    dynamic_quantize_matmul: bool = True
    matmul_integer_to_float: bool = True
    int8_kv: bool = True
    float_prompts: bool = False
    half_types: tuple[ir.DataType, ...] = ()
    float_attention: bool = True
    sliding_window: bool = True
    softcap: bool = True
    norms_in_attention: bool = False
    experts: ExpertKernels = ExpertKernels()
    branchwise_norms: bool = False
    matmul_bias: bool = True
    matmul_zero_points: bool = False
    padded_prompts: bool = True
    dequantize_blocks: bool = True
    position_inputs: bool = False
    multi_head_attention: bool = False
    opset: int = 23


# onnxruntime 1.31, contrib_ops/cpu; moe/moe_quantization_cpu.cc: SwiGLU interleaved, no third product; the
#   softmax is that of the chosen scores. Beside experts apart, 32 to 128 experts, 8 asked: QMoE takes 0.50 to
#   0.75 of a decoding step's time with 4 bits, 0.65 to 0.85 with 8, and 0.8 to 1.2 of that of 128 tokens. MoE
#   takes about the same, and gives zeros where it does not normalise and overwrites its input.
CPU = Kernels(
    experts=ExpertKernels(bits=(4, 8), router_weights=True),
    branchwise_norms=True,
    position_inputs=True,
    float_prompts=True,
    multi_head_attention=True,
)

# onnxruntime-gpu 1.31, contrib_ops/cuda (the kernel classes of its library were listed):
#   bert/group_query_attention.cc: T fp16 or bf16, never fp32; cache of T, int8, fp8 or 4 bits; softcap,
#     windows, packed QKV, rotary, q_norm_weight and k_norm_weight; head sizes in eights; several new tokens
#     on a cache only at batch 1, as on the CPU.
#   quantization/matmul_nbits.cc: fp32, fp16, bf16 (compute capability 8 up); 2, 4, 8 bits; blocks a power
#     of 2 from 16 up; a bias; no int8 activations, so accuracy_level means nothing.
#   quantization/gather_block_quantized.cc: uint8 of 4 or 8 bits to fp32, fp16, bf16.
#   moe/moe.cc: fp32, fp16, bf16; moe/moe_quantization.cc: fp16, bf16; 4 and 8 bits, blocks of 32 and more
#     where there are zero points, sizes in 64s, SwiGLU interleaved; ``weights_prepacked`` 0: raw weights.
#   quantize_linear.cc: DequantizeLinear to fp32 and fp16, not bf16. No DynamicQuantizeMatMul.
CUDA = Kernels(
    accuracy_level=0,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    half_types=(ir.DataType.FLOAT16, ir.DataType.BFLOAT16),
    float_attention=False,
    norms_in_attention=True,
    experts=ExpertKernels(
        float_weights=True, bits=(4, 8), multiple=64, zero_point_block=32, raw_weights=True
    ),
    padded_prompts=False,
    dequantize_blocks=False,
)

# onnxruntime-directml 1.24, core/providers/dml/DmlExecutionProvider/src/Operators:
#   DmlOperatorGroupQueryAttention.cpp: fp32, fp16; reads q, k, v, caches, seqlens_k, and ignores do_rotary,
#     local_window_size and softcap, so that these must stay outside; of several new tokens it takes the cache
#     to be empty (``SlotPolicy.prompts_on_cache``).
#   DmlOperatorMatMulNBits.cpp: 4 and 8 bits, insists on exactly four inputs.
#   docs/OperatorKernels.md: SkipSimplifiedLayerNormalization, RotaryEmbedding, QuickGelu in fp32 and fp16;
#     no GatherBlockQuantized, MoE or QMoE; the standard's operators up to opset 21.
DIRECTML = Kernels(
    rotary_in_attention=False,
    packed_qkv=False,
    accuracy_level=0,
    gather_block_quantized=False,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    int8_kv=False,
    half_types=(ir.DataType.FLOAT16,),
    sliding_window=False,
    softcap=False,
    matmul_bias=False,
    matmul_zero_points=True,
    padded_prompts=False,
    dequantize_blocks=False,
    opset=21,
)
