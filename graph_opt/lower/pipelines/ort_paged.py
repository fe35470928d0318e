"""Lower attention to com.microsoft ``PagedAttention``, for KV caches in blocks.

Source: onnxruntime 1.31, docs/ContribOperators.md and the checks in
    contrib_ops/cpu/bert/paged_attention_helper.h.
Only CUDA has a kernel: q, k and v in fp16 or bf16, head size divisible by 8, block size a power of 2 and at
least 16 tokens, and a window that includes the token itself.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import MICROSOFT
from ...passes.remove_unused import RemoveUnusedNodesPass
from ..attention.kv_int8 import CacheScales
from ..attention.rope_tables import RopeTablesPass
from ..outputs.hidden_states import LastHiddenStatePass
from ..outputs.logits import SelectLogitsPass
from ..paged_kv import BEGINS, BOUNDS, PAST, TABLE
from .paged import FlatLogitsPass, PagedAttentionPass, PagedInputsPass
from .paged_form import PagedForm

TABLES: dict[str, list[str | int]] = {
    BEGINS: ["rows_and_one"],
    PAST: ["rows"],
    TABLE: ["rows", "blocks_per_row"],
    BOUNDS: [3],
}
# The 8 inputs in front of the bounds: cos, sin, slot_mapping, head_sink, two norms, two scales.
FORM = PagedForm(
    domain=MICROSOFT,
    tables=TABLES,
    gap=8,
    block_axis=1,
    outputs=True,
    softcap=True,
    rotary=True,
    sinks=11,
    largest_head=256,
    equal_heads=True,
)


def ort_paged_passes(context_length: int, scales: CacheScales) -> list[ir.passes.PassBase]:
    """Return the passes that replace those for slots.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        scales: scales of a cache of 8 bits, see ``QuantizedCachePass``.
    """
    return [
        PagedAttentionPass(context_length, scales, FORM),
        RopeTablesPass(context_length),
        RemoveUnusedNodesPass(),
        PagedInputsPass(FORM),
        LastHiddenStatePass(),
        SelectLogitsPass(),
        FlatLogitsPass(FORM),
    ]
