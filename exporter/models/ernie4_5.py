"""ERNIE 4.5, text: Llama with a rope that rotates pairs of adjacent elements."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig, decoder_config, integer, rope_config, with_defaults
from .llama import build

__all__ = ["build", "config"]

DEFAULTS: RawConfig = {
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``use_bias`` is for all projections."""
    raw = with_defaults(raw, DEFAULTS)
    rope = rope_config(raw, interleaved=True)
    return decoder_config(
        {**raw, "attention_bias": raw["use_bias"], "mlp_bias": raw["use_bias"]},
        ropes=[rope] * integer(raw, "num_hidden_layers"),
    )
