"""The passes that lower a portable decoder graph to slots of a shared KV buffer."""

from __future__ import annotations

import onnx_ir as ir

from ....errors import UsageError
from ....records import dataclass
from ...passes.fuse.sink_attention import SinkAttentionPass
from ...passes.normalize.float_compute import FloatComputePass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ...passes.shape_inference import ShapeInferencePass
from ...quantize.formats.half import HalfPrecisionPass
from ...quantize.formats.half_pass import HALF_TYPES
from ..attention.attention import GroupQueryAttentionPass
from ..attention.kv_int8 import (
    FP8,
    INT8,
    KV_CACHE_MODES,
    CacheScales,
    QuantizedCachePass,
    TakeCacheScalesPass,
)
from ..attention.norms_in_attention import NormsInAttentionPass
from ..attention.recurrent_states import MicrosoftStatesPass, RefuseStatesPass
from ..attention.rope_tables import RopeTablesPass
from ..attention.shared_cache import SharedCachePass
from ..attention.slot_inputs import SlotInputsPass
from ..attention.unpadded_masks import RemovePaddingPass, ShortRangesPass
from ..chain.chain_pass import ChainPass
from ..kernels import CPU, Kernels
from ..norms.branchwise_norms import BranchwiseNormsPass
from ..norms.skip_norm import SkipNormPass
from ..older_opset import DecomposeNormsPass, MicrosoftGeluPass, MicrosoftRotaryPass, OlderOpsetPass
from ..outputs.draw_tokens import DrawTokensPass
from ..outputs.hidden_states import LastHiddenStatePass
from ..outputs.logits import SelectLogitsPass
from ..outputs.top_logits import TopLogitsPass
from ..products.block_minima import SplitMinimaPass
from ..products.dequantize_weights import DequantizeWeightsPass
from ..products.dynamic_int8 import DynamicProductsPass
from ..products.float8_weights import Float8WeightsPass
from ..products.half_products import HalfProductsPass
from ..products.int4_product import Int4ProductPass
from ..products.matmul_nbits import QuantizedWeightsPass
from ..products.merge import MergeProjectionsPass, PackedQKVPass
from ..products.moe import FusedExpertsPass
from ..products.quantized_experts import QuantizedExpertsPass
from ..products.quantized_linear import QuantizedLinearPass
from ..products.silu_and_mul import SiluAndMulPass
from ..products.static_int8 import StaticProductsPass
from ..products.weight_only_products import WeightOnlyProductsPass
from ..quick_gelu import QuickGeluPass
from ..require_dynamic_sequence import RequireDynamicSequencePass
from ..token_range import TokenRangePass
from .native_paged import native_paged_passes
from .ort_paged import ort_paged_passes
from .paged_decode import PagedDecodePass
from .standard import DecomposeAttentionPass

_NEWEST = 23  # the portable graph's opset


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions:
    """How a graph is lowered to slots.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        kernels: the capabilities of the target's kernels.
        kv_cache: ``int8``, ``fp8``, ``bfloat16`` (carryall's own attention only) or ``float32``; ``auto`` is
            int8 if the graph has scales and the target supports it, else, with carryall's own attention, by
            the bits of the weights.
        compute: FLOAT16 or BFLOAT16 to convert a float graph to it; None to convert 16-bit graphs to fp32.
        top_logits: number of top logits that the graph returns in addition to all logits; 0 for none.
        draws: draw tokens from these on the device, and read those of the run before; with ``paged`` alone.
        fused_experts: compute a mixture of experts in one operator where the target has it.
        paged: keep KV in blocks instead of slots; the target must have a kernel for that.
        explicit: keep attention and caches of the portable graph: past in, present out.
        compressed_kv: keep compressed keys and values of latent attention, with ``paged`` alone.
        bfloat16_states: store recurrent states in bfloat16 (carryall's own kernels only).

    Raises:
        UsageError: the target's kernels do not support a value, or two values exclude each other.
    """

    context_length: int
    kernels: Kernels = CPU
    kv_cache: str = "auto"
    compute: ir.DataType | None = None
    top_logits: int = 0
    draws: bool = False
    fused_experts: bool = True
    paged: bool = False
    explicit: bool = False
    compressed_kv: bool = False
    bfloat16_states: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache not in KV_CACHE_MODES:
            raise UsageError(f"kv_cache must be one of {', '.join(KV_CACHE_MODES)}, found '{self.kv_cache}'")
        if self.kv_cache in (INT8, FP8) and self.explicit:
            raise UsageError(f"explicit KV cannot be {self.kv_cache}; use kv_cache float32")
        lacks = {INT8: not self.kernels.int8_kv, FP8: not self.kernels.fp8_kv}
        if lacks.get(self.kv_cache):
            raise UsageError(
                f"the target's attention kernel has no {self.kv_cache} KV cache; use kv_cache float32"
            )
        if self.kv_cache == "bfloat16" and not (self.paged and self.kernels.paged_attention):
            raise UsageError("a bfloat16 KV cache needs carryall's CPU kernels and kv_memory=paged")
        if self.bfloat16_states and not (self.paged and self.kernels.paged_attention):
            raise UsageError(
                "bfloat16 states need carryall's CPU kernels and kv_memory=paged; use state_cache=float32"
            )
        if self.compute is None and not self.kernels.float_attention:
            raise UsageError("the target's attention kernel computes in fp16 or bf16, not in fp32")


def slot_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes in order. See "The slot graph" in ``docs/contract.md``."""
    kernels, scales = options.kernels, CacheScales()
    own_blocks = options.paged and kernels.paged_attention  # whose scales are computed as KV is written
    scaled = options.kv_cache in (INT8, FP8) and not own_blocks
    passes: list[ir.passes.PassBase] = [
        RequireDynamicSequencePass(),
        *_state_passes(options),
        TakeCacheScalesPass(scales, required=scaled),
        *_float_passes(options),
        ShapeInferencePass(),
    ]
    if not options.explicit and (options.paged or kernels.head_sink):
        passes.append(SinkAttentionPass())
    if options.compute is not None:
        passes += [HalfPrecisionPass(options.compute), ShapeInferencePass()]
    passes.append(TokenRangePass())
    quantized_kv = kernels.int8_kv and options.kv_cache != "float32"
    quantized_kv = quantized_kv and not (own_blocks or options.explicit)
    passes += _attention_passes(options, scales)
    if kernels.norms_in_attention:
        passes.append(NormsInAttentionPass(scales if quantized_kv else None))
    passes += _product_passes(options)
    if quantized_kv:
        passes.append(QuantizedCachePass(scales, FP8 if options.kv_cache == FP8 else INT8))
    if kernels.packed_qkv:
        passes.append(PackedQKVPass())
    if options.paged and kernels.paged_decode:
        passes.append(PagedDecodePass())
    passes += _elementwise_passes(kernels)
    passes.append(QuantizedWeightsPass(kernels))
    if kernels.int4_product:
        passes.append(Int4ProductPass())
    if not kernels.dequantize_blocks:
        passes.append(DequantizeWeightsPass())
    if kernels.opset < _NEWEST:
        passes += [MicrosoftRotaryPass(), DecomposeNormsPass()]
    if options.top_logits:
        passes.append(TopLogitsPass(options.top_logits, kernels.draw_tokens))
        if options.draws:
            passes.append(DrawTokensPass())
    passes += [RemoveUnusedNodesPass(), OlderOpsetPass(kernels.opset)]
    if options.paged and kernels.paged_attention:
        passes.append(ChainPass())
    return passes


def _state_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes for recurrent states; carryall's own are among those for its blocks."""
    if options.explicit:
        return [MicrosoftStatesPass()]
    return [] if options.paged and options.kernels.paged_attention else [RefuseStatesPass()]


def _attention_passes(options: SlotOptions, scales: CacheScales) -> list[ir.passes.PassBase]:
    kernels = options.kernels
    if options.paged and kernels.paged_attention:
        return native_paged_passes(
            options.context_length,
            scales,
            options.kv_cache,
            compressed=options.compressed_kv,
            bfloat16_states=options.bfloat16_states,
        )
    if options.paged:
        return ort_paged_passes(options.context_length, scales)
    if options.explicit:
        return [*_decomposed(options), LastHiddenStatePass(), SelectLogitsPass()]
    return [
        GroupQueryAttentionPass(options.context_length, kernels),
        RemoveUnusedNodesPass(),
        SlotInputsPass(padded_prompts=kernels.padded_prompts, position_inputs=kernels.position_inputs),
        LastHiddenStatePass(),
        SelectLogitsPass(),
    ]


def _decomposed(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes for explicit attention without a kernel; angles then come from tables."""
    if options.kernels.standard_attention:
        return []
    return [
        RopeTablesPass(options.context_length),
        RemoveUnusedNodesPass(),
        SharedCachePass(),
        RemovePaddingPass(),
        ShortRangesPass(),
        DecomposeAttentionPass(),
        ShapeInferencePass(),
    ]


def _product_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes for experts and for products with quantized weights."""
    kernels, passes = options.kernels, list[ir.passes.PassBase]()
    if options.fused_experts:
        if kernels.quantized_linear:
            passes.append(QuantizedExpertsPass(kernels.stored_tiles))
        passes.append(FusedExpertsPass(kernels.experts, accuracy_level=kernels.accuracy_level))
    passes.append(MergeProjectionsPass())
    if kernels.quantized_linear:
        passes += [QuantizedLinearPass(kernels.stored_tiles), HalfProductsPass(split=kernels.split_floats)]
    passes.append(SplitMinimaPass())
    if kernels.branchwise_norms:
        passes.append(BranchwiseNormsPass())
    if kernels.dynamic_quantize_matmul:
        passes.append(DynamicProductsPass())
    if kernels.matmul_integer_to_float:
        passes.append(StaticProductsPass())
    return passes


def _elementwise_passes(kernels: Kernels) -> list[ir.passes.PassBase]:
    """Return the passes for norms with residual sums, and for activation functions."""
    passes = list[ir.passes.PassBase]()
    if kernels.skip_norm:
        passes.append(SkipNormPass())
    if kernels.quick_gelu:
        passes.append(QuickGeluPass())
    if kernels.silu_and_mul and kernels.quick_gelu:
        passes.append(SiluAndMulPass())
    if not kernels.standard_gelu:
        passes.append(MicrosoftGeluPass())
    return passes


def _float_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    passes: list[ir.passes.PassBase] = [Float8WeightsPass()]
    dynamic = not options.kernels.dynamic_quantize_matmul
    static = not options.kernels.matmul_integer_to_float
    if dynamic or static:
        passes.append(WeightOnlyProductsPass(dynamic=dynamic, static=static))
    keep = () if options.compute is None else [HALF_TYPES[name] for name in options.kernels.half_types]
    return [*passes, FloatComputePass(keep=keep)]
