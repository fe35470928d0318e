"""Granite with sliding windows, sinks of attention and a rotary base of each layer."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    RopeConfig,
    integer,
    layer_windows,
    mapping,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from . import granite

DEFAULTS: RawConfig = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. A layer whose ``layer_rope_theta`` is 0 has no rotary embedding."""
    raw = with_defaults(raw, DEFAULTS)
    count = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or [
        "sliding_attention" if layer % 4 else "full_attention" for layer in range(count)
    ]
    rope = mapping(raw, "rope_parameters", "rope_scaling")
    thetas = raw.get("layer_rope_theta")
    ropes = [rope_config(raw)] * count if thetas is None else [_rope(raw, rope, theta) for theta in thetas]
    return dataclasses.replace(
        granite.config(raw),
        windows=tuple(layer_windows(types, raw["sliding_window"])),
        ropes=tuple(ropes),
    )


def _rope(raw: RawConfig, rope: RawConfig, theta: float) -> RopeConfig | None:
    return rope_config(raw, {**rope, "rope_theta": theta}) if theta else None


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return granite.build(net, mix=attention)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with a sink for each head."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention_with_sinks(net, layer, q, k, v, net.weight("sinks", c.num_heads))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
