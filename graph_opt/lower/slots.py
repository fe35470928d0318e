"""The list that lowers a portable decoder graph to slots of a shared KV buffer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from .attention import GroupQueryAttentionPass
from .kernels import CPU, Kernels
from .logits import SelectLogitsPass
from .matmul_nbits import QuantizedWeightsPass
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
    return [
        GroupQueryAttentionPass(options.context_length, options.kernels),
        common.RemoveUnusedNodesPass(),
        SlotInputsPass(),
        SelectLogitsPass(),
        QuantizedWeightsPass(options.kernels),
        common.RemoveUnusedNodesPass(),
    ]
