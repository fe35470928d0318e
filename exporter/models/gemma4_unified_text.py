"""Gemma 4 12B, text: Gemma 4 without experts and without embeddings of each layer."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig
from . import gemma4_text
from .gemma4_text import build

__all__ = ["build", "config"]


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    sizes: RawConfig = {"sliding_window": 1024, "max_position_embeddings": 262_144}
    return gemma4_text.config({**sizes, **raw, "hidden_size_per_layer_input": 0, "enable_moe_block": False})
