"""Qwen 3.5, 3.6 and 3.8, text, with a sparse mixture of experts and a shared expert in every layer."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig, with_defaults
from . import qwen3_5_text
from .qwen2_moe import experts
from .qwen3_5_text import build, draft_head, hybrid_config

__all__ = ["build", "config", "draft_head"]

DEFAULTS: RawConfig = {
    **qwen3_5_text.DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The weights of a token's experts always have a sum of 1."""
    raw = {**with_defaults(raw, DEFAULTS), "norm_topk_prob": True}
    return hybrid_config(raw, experts(raw))
