"""Seed-OSS: Llama with biases of queries, keys and values, and perhaps of the output of attention."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder

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


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.output_bias)
