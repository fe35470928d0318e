"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig, decoder_config, integer
from .llama import build

__all__ = ["build", "config"]


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A ``sliding_window`` of null means none; a missing one means 4096."""
    window = raw.get("sliding_window", 4096)
    return decoder_config(
        raw,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
        windows=[window] * integer(raw, "num_hidden_layers"),
    )
