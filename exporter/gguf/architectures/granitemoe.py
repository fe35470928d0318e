"""Granite with experts."""

from __future__ import annotations

from ..architecture import Architecture
from . import granite

NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


NAME = "granitemoe"
ARCHITECTURE = Architecture(
    model_type="granitemoe",
    rotates_pairs=True,
    inner=NAMES,
    experts="block_sparse_moe",
    keys=granite.KEYS,
    adapt=granite.adapt,
)
