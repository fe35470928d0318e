"""The list that lowers a portable decoder graph to slots of a shared KV buffer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from ...runtime.errors import UsageError
from ..rules.base import RulePass
from .attention import GroupQueryAttentionPass
from .dynamic_int8 import DynamicProductsPass
from .float_compute import FloatComputePass
from .kernels import CPU, Kernels
from .kv_int8 import KV_CACHE_MODES, CacheScales, Int8CachePass, TakeCacheScalesPass
from .logits import SelectLogitsPass
from .matmul_nbits import QuantizedWeightsPass
from .merge import MergeProjectionsPass, PackedQKVPass
from .quick_gelu import QuickGelu
from .skip_norm import SkipNormPass
from .slot_inputs import SlotInputsPass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions:
    """How a graph is lowered to slots.

    Args:
        context_length: most tokens a sequence will have; rope tables are this long.
        kernels: what the target's kernels take.
        kv_cache: ``int8`` or ``float32``; ``auto`` is int8 where the graph has scales and the target kernels.
    """

    context_length: int
    kernels: Kernels = CPU
    kv_cache: str = "auto"

    def __post_init__(self) -> None:
        if self.kv_cache not in KV_CACHE_MODES:
            raise UsageError(f"kv_cache is one of {', '.join(KV_CACHE_MODES)}, not '{self.kv_cache}'")
        if self.kv_cache == "int8" and not self.kernels.int8_kv:
            raise UsageError("the target's attention kernel has no int8 KV cache")


def slot_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes, in order. See "The lowered graph of slot providers" in ``docs/architecture.md``."""
    kernels, scales = options.kernels, CacheScales()
    passes: list[ir.passes.PassBase] = [
        *([] if kernels.half_precision else [FloatComputePass()]),
        common.ShapeInferencePass(),
        TakeCacheScalesPass(scales, required=options.kv_cache == "int8"),
        GroupQueryAttentionPass(options.context_length, kernels),
        common.RemoveUnusedNodesPass(),
        SlotInputsPass(),
        SelectLogitsPass(),
        MergeProjectionsPass(),
    ]
    if kernels.dynamic_quantize_matmul:
        passes.append(DynamicProductsPass())
    if kernels.int8_kv and options.kv_cache != "float32":
        passes.append(Int8CachePass(scales))
    if kernels.packed_qkv:
        passes.append(PackedQKVPass())
    if kernels.skip_norm:
        passes.append(SkipNormPass())
    if kernels.quick_gelu:
        passes.append(RulePass("QuickGelu", [QuickGelu()]))
    return [*passes, QuantizedWeightsPass(kernels), common.RemoveUnusedNodesPass()]
