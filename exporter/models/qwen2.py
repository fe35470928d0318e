"""Qwen 2 and 2.5: biases on queries, keys and values; an optional sliding window in the upper layers."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, layer_windows, with_defaults
from ..decoder import Decoder


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw, windows=windows(raw))


def windows(raw: RawConfig) -> list[int | None]:
    """Return each layer's window, read from ``layer_types`` or, in older files, ``max_window_layers``."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    raw = with_defaults(raw)
    first = integer(raw, "max_window_layers", 28)
    types = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    return layer_windows(types, window)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=True)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, net.config.q_size, net.config.hidden_size)
