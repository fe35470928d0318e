"""The capabilities of a target's kernels, which decide between lowered forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...records import dataclass


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How kernels read a type of blocks: the attributes of ``QuantizedLinear``.

    Args:
        bits: of a value.
        block: inputs with one scale, as a float16 or as an integer times the float16 of its group.
        group: inputs with one float16 scale; 0 if each block has its own.
        offsets: ``HALF_MIDDLE`` or ``HALF_MINIMA`` of ``products/stored_tiles.py``.
    """

    bits: int
    block: int
    group: int
    offsets: int


# Writes rows [outputs, bytes in the file] of a form, with so many inputs each, as tiles [tiles, bytes].
TilePacker = Callable[[StoredForm, Sequence[npt.NDArray[np.uint8]], int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """What MoE and QMoE support and compute faster than separate experts.

    Args:
        float_weights: MoE supports float experts.
        bits: the weight widths that QMoE supports.
        multiple: QMoE's hidden and intermediate sizes must be multiples of this.
        zero_point_block: the smallest block size for which QMoE supports zero points.
        raw_weights: QMoE needs ``weights_prepacked`` 0 for weights that are not in the kernel's own layout.
        router_weights: QMoE reads routing weights that are not normalised from an input, because it always
            normalises those that it computes; else an attribute selects normalisation.
    """

    float_weights: bool = False
    bits: tuple[int, ...] = ()
    multiple: int = 1
    zero_point_block: int = 16
    raw_weights: bool = False
    router_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The capabilities of one execution provider. Add a field here instead of testing a provider's name.

    Args:
        rotary_in_attention: GroupQueryAttention applies the rotary embedding itself.
        packed_qkv: GroupQueryAttention accepts q, k and v as one tensor.
        skip_norm: SkipSimplifiedLayerNormalization and SkipLayerNormalization exist and are faster.
        quick_gelu: QuickGelu is faster than Sigmoid and Mul.
        standard_gelu: the standard's Gelu has a kernel; else com.microsoft's do.
        matmul_nbits: MatMulNBits exists for these weight widths.
        accuracy_level: MatMulNBits' ``accuracy_level``; 4 computes in int8, 1 in fp32, 0 leaves it unset.
        gather_block_quantized: GatherBlockQuantized exists.
        gather_zero_points: it reads zero points of 4 bits as its definition says, each row padded to bytes.
        quantized_linear: carryall's own kernels are registered with the session, and preferred.
        stored_tiles: writes weights of GGUF files as tiles of the same size; None without such kernels.
        split_floats: they multiply floats as one bfloat16 or as the sum of two, faster than as floats.
        paged_attention: PagedAttention is carryall's own, for CPUs.
        silu_and_mul: carryall's ``SiluAndMul`` is registered with the session.
        draw_tokens: the most candidates of carryall's ``DrawTokens``; 0 if it is not registered.
        int4_product: carryall's ``MatMulNBits`` is registered with the session.
        paged_decode: carryall's ``PagedDecode`` is registered with the session.
        dynamic_quantize_matmul: DynamicQuantizeMatMul exists.
        matmul_integer_to_float: MatMulIntegerToFloat exists.
        int8_kv: GroupQueryAttention, and PagedAttention if there is one, support an int8 cache.
        fp8_kv: they support a cache of float8e4m3fn.
        half_types: the 16-bit types that graphs can be computed in; others are converted to fp32.
        float_attention: GroupQueryAttention computes in fp32 too.
        sliding_window: GroupQueryAttention supports ``local_window_size``.
        softcap: GroupQueryAttention supports ``softcap``.
        head_sink: GroupQueryAttention supports ``head_sink``.
        norms_in_attention: GroupQueryAttention normalises the heads of q and k itself.
        experts: capabilities of MoE and QMoE.
        branchwise_norms: BranchwiseRMSNorm exists, which normalises heads without a reshape.
        matmul_bias: MatMulNBits supports a bias.
        matmul_zero_points: MatMulNBits needs zero points even if they are the middle of the range.
        matmul_whole_blocks: MatMulNBits needs rows of whole blocks.
        padded_prompts: new prompts run together, padded on the right; not possible for captured runs.
        dequantize_blocks: DequantizeLinear supports blocked weights of every type that is used here.
        position_inputs: GroupQueryAttention rotates by ``position_ids``, so that tokens can be evicted from
            the cache while positions continue.
        multi_head_attention: MultiHeadAttention is not slower than separate operators, in graphs other than
            decoders.
        tower_attention: MultiHeadAttention computes the groups of patches of towers.
        explicit_states: com.microsoft's LinearAttention and CausalConvWithState exist.
        standard_attention: the standard's Attention exists, with past and present.
        opset: the newest standard opset whose operators have kernels.
    """

    rotary_in_attention: bool = True
    packed_qkv: bool = True
    skip_norm: bool = True
    quick_gelu: bool = True
    standard_gelu: bool = True
    matmul_nbits: tuple[int, ...] = (4, 8)
    accuracy_level: int = 4
    gather_block_quantized: bool = True
    gather_zero_points: bool = True
    quantized_linear: bool = False
    stored_tiles: TilePacker | None = None
    split_floats: bool = False
    paged_attention: bool = False
    silu_and_mul: bool = False
    draw_tokens: int = 0
    int4_product: bool = False
    paged_decode: bool = False
    dynamic_quantize_matmul: bool = True
    matmul_integer_to_float: bool = True
    int8_kv: bool = True
    fp8_kv: bool = False
    half_types: tuple[str, ...] = ()
    float_attention: bool = True
    sliding_window: bool = True
    softcap: bool = True
    head_sink: bool = True
    norms_in_attention: bool = False
    experts: ExpertKernels = ExpertKernels()
    branchwise_norms: bool = False
    matmul_bias: bool = True
    matmul_zero_points: bool = False
    matmul_whole_blocks: bool = False
    padded_prompts: bool = True
    dequantize_blocks: bool = True
    position_inputs: bool = False
    multi_head_attention: bool = False
    tower_attention: bool = False
    explicit_states: bool = False
    standard_attention: bool = True
    opset: int = 23


# onnxruntime 1.31, contrib_ops/cpu; moe/moe_quantization_cpu.cc: SwiGLU interleaved, no FC3; the softmax is
# over the selected scores only. Time relative to separate experts, with 8 of 32 to 128 experts per token:
# QMoE takes 0.50 to 0.75 for a decoding step with 4 bits, 0.65 to 0.85 with 8 bits, and 0.8 to 1.2 for 128
# tokens. MoE is not faster, returns zeros without normalisation, and overwrites its input.
CPU = Kernels(
    experts=ExpertKernels(bits=(4, 8), router_weights=True),
    branchwise_norms=True,
    position_inputs=True,
    multi_head_attention=True,
    tower_attention=True,
    explicit_states=True,
)

# onnxruntime-gpu 1.31, contrib_ops/cuda (the kernel classes of its library were listed):
#   bert/group_query_attention.cc: T fp16 or bf16, never fp32; cache of T, int8, fp8 or 4 bits; softcap,
# windows, packed QKV, rotary, q_norm_weight and k_norm_weight; head sizes divisible by 8; several new tokens
# on a cache only at batch 1, as on the CPU. quantization/matmul_nbits.cc: fp32, fp16, bf16 (compute
# capability 8 or higher); 2, 4, 8 bits; block size a power of 2, at least 16; a bias; no int8 activations,
# so accuracy_level has no effect. quantization/gather_block_quantized.cu: uint8 of 4 or 8 bits to fp32,
# fp16, bf16; 4-bit zero points are read as one sequence, rows not padded. moe/moe.cc: fp32, fp16, bf16;
# moe/moe_quantization.cc: fp16, bf16; 4 and 8 bits, block size at least 32 with zero points, sizes divisible
# by 64, SwiGLU interleaved; ``weights_prepacked`` 0: raw weights.
# quantize_linear.cc: DequantizeLinear to fp32 and fp16, not bf16. No DynamicQuantizeMatMul.
CUDA = Kernels(
    accuracy_level=0,
    tower_attention=True,
    explicit_states=True,
    fp8_kv=True,
    gather_zero_points=False,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    half_types=("fp16", "bf16"),
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
# local_window_size and softcap, so these must be separate nodes; with several new tokens it assumes an empty
# cache (``SlotPolicy.prompts_on_cache``). DmlOperatorMatMulNBits.cpp: 4 and 8 bits, requires exactly four
# inputs, and K divisible by the block size. docs/OperatorKernels.md: SkipSimplifiedLayerNormalization,
# RotaryEmbedding, QuickGelu, FastGelu, com.microsoft's Gelu in fp32 and fp16; no GatherBlockQuantized, MoE or
# QMoE; the standard's operators up to opset 21, without Gelu.
DIRECTML = Kernels(
    rotary_in_attention=False,
    packed_qkv=False,
    standard_gelu=False,
    accuracy_level=0,
    gather_block_quantized=False,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    int8_kv=False,
    half_types=("fp16",),
    sliding_window=False,
    softcap=False,
    head_sink=False,
    matmul_bias=False,
    matmul_zero_points=True,
    matmul_whole_blocks=True,
    padded_prompts=False,
    dequantize_blocks=False,
    opset=21,
)

# onnxruntime-ep-webgpu 0.4, contrib_ops/webgpu, compared with the CPU's kernels on software devices:
#   MatMulNBits of 2, 4 and 8 bits with zero points and bias, GatherBlockQuantized without zero points,
# SkipSimplifiedLayerNormalization, GroupQueryAttention packed, with rotary, windows, and rows of several
# lengths are right. GroupQueryAttention ignores softcap and ``position_ids``, has no int8 cache, and refuses
# q_norm_weight with packed operands. No MoE. 64-bit integers are indices and shapes only.
WEBGPU = Kernels(
    accuracy_level=0,
    tower_attention=True,
    explicit_states=True,
    standard_attention=False,
    gather_zero_points=False,
    dynamic_quantize_matmul=False,
    matmul_integer_to_float=False,
    int8_kv=False,
    half_types=("fp16",),
    softcap=False,
    head_sink=False,
    padded_prompts=False,
    dequantize_blocks=False,
)
