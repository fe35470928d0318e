"""SmolLM 3: Llama with layers that have no rotary embedding (https://arxiv.org/abs/2501.18795)."""

from __future__ import annotations

from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    rope_config,
    with_defaults,
)
from .llama import build

__all__ = ["build", "config"]

DEFAULTS: RawConfig = {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2_000_000.0}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Its ``no_rope_layers`` holds 1 for layers *with* a rope."""
    raw = with_defaults(raw, DEFAULTS)
    interval = integer(raw, "no_rope_layer_interval", 4)
    has_rope = raw.get("no_rope_layers") or [
        (layer + 1) % interval != 0 for layer in range(integer(raw, "num_hidden_layers"))
    ]
    types = raw.get("layer_types") or ["full_attention" if rope else "sliding_attention" for rope in has_rope]
    rope = rope_config(raw)
    return decoder_config(
        raw,
        windows=layer_windows(types, raw.get("sliding_window") if raw.get("use_sliding_window") else None),
        ropes=[rope if flag else None for flag in has_rope],
    )
