"""Granite 3 with a sparse mixture of experts in every layer."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig, integer
from . import granitemoehybrid
from .granitemoehybrid import build

__all__ = ["build", "config"]


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json: attention with a rotary embedding in all layers, no layer of all tokens."""
    return granitemoehybrid.config(
        {
            **raw,
            "layer_types": ["attention"] * integer(raw, "num_hidden_layers"),
            "position_embedding_type": "rope",
            "shared_intermediate_size": raw.get("shared_intermediate_size", 0),
        }
    )
