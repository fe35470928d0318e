"""EXAONE 4: norms behind each part and of each q and k head, global layers without a rope."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from .qwen3 import attention

DEFAULTS: RawConfig = {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A ``sliding_window`` of null means that all layers are global, with a rope."""
    window = raw.get("sliding_window", 4096) or None
    raw = with_defaults(raw, DEFAULTS)
    types = _layer_types(raw, window)
    rope = rope_config(raw)
    return decoder_config(
        {**raw, "attention_bias": False},
        windows=layer_windows(types, window),
        ropes=[rope if window is None or kind == "sliding_attention" else None for kind in types],
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.post_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def _layer_types(raw: RawConfig, window: int | None) -> Sequence[str]:
    """Return ``layer_types``, else those of ``sliding_window_pattern``: a period, or letters L and G."""
    count, pattern = integer(raw, "num_hidden_layers"), raw.get("sliding_window_pattern", 4)
    if raw.get("layer_types"):
        types: Sequence[str] = raw["layer_types"]
        return types
    if window is None or not pattern:
        return ["full_attention"] * count
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    local = [letters[layer % len(letters)] == "L" for layer in range(count)]
    if isinstance(pattern, str):
        local[-1] = False
    return ["sliding_attention" if flag else "full_attention" for flag in local]
