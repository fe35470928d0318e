"""Lower attention to carryall's own ``PagedAttention`` for CPUs, for KV caches in blocks."""

from __future__ import annotations

import onnx_ir as ir

from ...passes.remove_unused import RemoveUnusedNodesPass
from ..attention.cross_attention import CrossAttentionPass
from ..attention.kv_int8 import CacheScales
from ..attention.native_attention import NativeAttentionPass
from ..attention.recurrent_states import NativeStatesPass
from ..attention.rope_tables import RopeTablesPass
from ..attention.shared_cache import SharedCachePass
from ..outputs.hidden_states import LastHiddenStatePass
from ..outputs.logits import SelectLogitsPass
from ..paged_kv import BEGINS, PAST, TABLE
from .latent_cache import LatentCachePass
from .paged import FlatLogitsPass, PagedAttentionPass, PagedInputsPass
from .paged_form import DOMAIN, PagedForm

TABLES: dict[str, list[str | int]] = {
    BEGINS: ["rows_and_one"],
    PAST: ["rows"],
    TABLE: ["rows", "blocks_per_row"],
}
# Between PAST and TABLE: cosines and sines. Behind TABLE: sinks, slopes, ahead.
FORM = PagedForm(
    domain=DOMAIN,
    tables=TABLES,
    gap=2,
    softcap=True,
    rotary=True,
    flat=False,
    sinks=10,
    slopes=11,
    ahead=12,
    own_angles=True,
    cross=True,
)


def native_paged_passes(
    context_length: int,
    scales: CacheScales,
    cache_type: str,
    *,
    compressed: bool = False,
    bfloat16_states: bool = False,
) -> list[ir.passes.PassBase]:
    """Return the passes that replace those for slots.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        scales: scales of an int8 cache, filled by an earlier pass. They are dropped: the kernel computes one
            for each token and head.
        cache_type: ``float32``, ``bfloat16`` or ``int8``; ``auto``: see ``NativeAttentionPass``.
        compressed: see ``LatentCachePass``.
        bfloat16_states: see ``NativeStatesPass``.
    """
    return [
        *([LatentCachePass()] if compressed else []),
        SharedCachePass(),
        PagedAttentionPass(context_length, scales, FORM),
        NativeStatesPass(bfloat16=bfloat16_states),
        RopeTablesPass(context_length),
        RemoveUnusedNodesPass(),
        PagedInputsPass(FORM),
        NativeAttentionPass(cache_type, scales),
        CrossAttentionPass(),
        RemoveUnusedNodesPass(),
        LastHiddenStatePass(),
        SelectLogitsPass(),
        FlatLogitsPass(FORM),
    ]
