"""The list that lowers a portable decoder graph to slots of a shared KV buffer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from ..rules.base import RulePass
from .attention import GroupQueryAttentionPass
from .kernels import CPU, Kernels
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
    """

    context_length: int
    kernels: Kernels = CPU


def slot_passes(options: SlotOptions) -> list[ir.passes.PassBase]:
    """Return the passes, in order. See "The lowered graph of slot providers" in ``docs/architecture.md``."""
    kernels = options.kernels
    passes: list[ir.passes.PassBase] = [
        common.ShapeInferencePass(),
        GroupQueryAttentionPass(options.context_length, kernels),
        common.RemoveUnusedNodesPass(),
        SlotInputsPass(),
        SelectLogitsPass(),
        MergeProjectionsPass(),
    ]
    if kernels.packed_qkv:
        passes.append(PackedQKVPass())
    if kernels.skip_norm:
        passes.append(SkipNormPass())
    if kernels.quick_gelu:
        passes.append(RulePass("QuickGelu", [QuickGelu()]))
    return [*passes, QuantizedWeightsPass(kernels), common.RemoveUnusedNodesPass()]
