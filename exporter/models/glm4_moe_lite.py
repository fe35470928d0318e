"""GLM 4.7 Flash: latent attention and experts of DeepSeek-V3."""

from __future__ import annotations

import dataclasses

from ..config import DecoderConfig, RawConfig, with_defaults
from . import deepseek_v3
from .deepseek_v3 import build

__all__ = ["build", "config"]

DEFAULTS: RawConfig = {
    **deepseek_v3.DEFAULTS,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 202_752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``mlp_layer_types`` names the dense layers; by default the first is dense."""
    normalised = deepseek_v3.config({"q_lora_rank": 768, **with_defaults(raw, DEFAULTS), **_null_rank(raw)})
    kinds = raw.get("mlp_layer_types")
    if not kinds:
        return normalised
    sparse = next((each for each in normalised.experts if each is not None), None)
    return dataclasses.replace(
        normalised, experts=tuple(sparse if kind == "sparse" else None for kind in kinds)
    )


def _null_rank(raw: RawConfig) -> RawConfig:
    """Return the rank of queries if it is null, which means no compression."""
    return {"q_lora_rank": None} if "q_lora_rank" in raw and raw["q_lora_rank"] is None else {}
