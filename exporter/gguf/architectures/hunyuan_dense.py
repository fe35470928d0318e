"""Hunyuan without experts."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "hunyuan-dense"
ARCHITECTURE = Architecture(
    model_type="hunyuan_v1_dense",
    inner={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
)
