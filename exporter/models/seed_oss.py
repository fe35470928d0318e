"""Seed-OSS: Llama with biases of queries, keys and values, and perhaps of the output of attention."""

from __future__ import annotations

import dataclasses

from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from .llama import build

__all__ = ["build", "config"]

DEFAULTS: RawConfig = {
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 8,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    return dataclasses.replace(decoder_config(raw), output_bias=bool(raw["attention_out_bias"]))
