"""MiniCPM 3: latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors, stated
from . import deepseek2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of heads, and the factors that llama.cpp has for the one published model."""
    rotary, heads = stated(config, "qk_rope_head_dim"), stated(config, "num_attention_heads")
    output = tensors.get("model.layers.0.self_attn.o_proj.weight")
    return {
        "qk_nope_head_dim": stated(config, "head_dim") - rotary,
        "v_head_dim": None if output is None else output.shape[1] // heads,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "partial_rotary_factor": None,
    }


NAME = "minicpm3"
ARCHITECTURE = Architecture(
    model_type="minicpm3", inner=deepseek2.LATENT, own_heads=True, keys=deepseek2.LATENT_KEYS, adapt=_adapt
)
