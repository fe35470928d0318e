"""Hunyuan dense (0.5B to 7B): Llama with RMSNorm of each query and key head behind the rotation."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, mapping, number, rope_config
from ..decoder import Decoder


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json.

    Its rope of the type "dynamic" has a fixed factor ``alpha`` of NTK-aware scaling, which does not depend on
    the length of the text.
    """
    rope, alpha = rope_config(raw), number(mapping(raw, "rope_parameters", "rope_scaling"), "alpha", 0.0)
    if rope.rope_type == "dynamic" and alpha:
        size = rope.rotary_dim
        rope = dataclasses.replace(rope, rope_type="default", theta=rope.theta * alpha ** (size / (size - 2)))
    return decoder_config(raw, ropes=[rope] * decoder_config(raw).num_layers)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with norms of heads behind the rotation."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        q = layers.head_norm(net, "query_layernorm", layers.rotated(net, layer, q, c.num_heads), c.num_heads)
        k = layers.head_norm(
            net, "key_layernorm", layers.rotated(net, layer, k, c.num_kv_heads), c.num_kv_heads
        )
        out = layers.attention(net, layer, q, k, v, rotate=False)
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
