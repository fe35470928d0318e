"""Gemma 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import NORMS_BEHIND, Architecture, Tensors

NAMES = {**NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_LAYERS_OF_27B = (46, 62)  # of Gemma 2 and 3


def scale(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return query_pre_attn_scalar: the head size; for the 27 B models hidden size / heads."""
    if config.get("num_hidden_layers") in _LAYERS_OF_27B:
        return {"query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]}
    return {"query_pre_attn_scalar": config["head_dim"]} if "head_dim" in config else {}


NAME = "gemma2"
ARCHITECTURE = Architecture(model_type="gemma2", inner=NAMES, norm_offset=1.0, adapt=scale)
