"""Attention as ONNX Runtime's own ``PagedAttention``, for engines that keep KV in blocks.

The operator is com.microsoft's, of onnxruntime 1.31 (docs/ContribOperators.md, and the checks in
contrib_ops/cpu/bert/paged_attention_helper.h). Only CUDA has a kernel: q, k and v in fp16 or bf16, head sizes
in eights, blocks of a power of two from 16 tokens up, a window that counts the token itself.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ...graph.edit import MICROSOFT
from ..attention.kv_int8 import CacheScales
from ..attention.rope_tables import RopeTablesPass
from ..outputs.logits import SelectLogitsPass
from .paged import FlatLogitsPass, PagedAttentionPass, PagedForm, PagedInputsPass

BEGINS, PAST, TABLE = "cumulative_sequence_length", "past_seqlens", "block_table"
# [most new tokens of a row, most tokens of a row] on the host: without, the kernel waits for the device to
# learn them, in every layer.
BOUNDS = "attention_metadata"
TABLES: dict[str, list[str | int]] = {
    BEGINS: ["rows_and_one"],
    PAST: ["rows"],
    TABLE: ["rows", "blocks_per_row"],
    BOUNDS: [2],
}
# Left out in front of the bounds: cos, sin, slot_mapping, head_sink, two norms, two scales.
FORM = PagedForm(
    domain=MICROSOFT, tables=TABLES, gap=8, block_axis=1, outputs=True, softcap=True, rotary=True
)


def ort_paged_passes(context_length: int, scales: CacheScales) -> list[ir.passes.PassBase]:
    """Return the passes that stand in the place of those for slots.

    Args:
        context_length: most tokens a sequence will have; rope tables are this long.
        scales: of a cache of 8 bits, which is left float here.
    """
    return [
        PagedAttentionPass(context_length, scales, FORM),
        RopeTablesPass(context_length),
        common.RemoveUnusedNodesPass(),
        PagedInputsPass(FORM),
        SelectLogitsPass(),
        FlatLogitsPass(FORM),
    ]


def block_size(head_size: int) -> int:
    """Positions of a block: the fewest that FlashAttention's paged kernel takes for this size of heads."""
    return 256 if head_size <= 64 else 128 if head_size <= 128 else 64
