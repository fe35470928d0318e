"""OLMo 3: OLMo 2 with a sliding window, and a rotary embedding of its own, in three of four layers."""

from __future__ import annotations

from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    ropes_of_types,
    with_defaults,
)
from .olmo2 import build

__all__ = ["build", "config"]

DEFAULTS: RawConfig = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "rope_theta": 500_000.0,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The extension that ``rope_scaling`` describes is that of full layers."""
    raw = with_defaults(raw, DEFAULTS)
    types = raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % 4 else "full_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    if not raw.get("rope_parameters"):
        ropes = {"full_attention": raw.get("rope_scaling") or {}, "sliding_attention": {}}
        raw = {**raw, "rope_parameters": ropes}
    return decoder_config(
        raw, windows=layer_windows(types, raw["sliding_window"]), ropes=ropes_of_types(raw, types)
    )
