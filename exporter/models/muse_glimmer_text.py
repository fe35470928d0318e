"""Muse Glimmer, text: norms of heads without weights, gates of attention, layers without rotation."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    number,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from .gemma3_text import norm, one_plus

DEFAULTS: RawConfig = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
_PATTERN = 4  # counted from the last layer, one of so many attends to all tokens and has no rotation


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The factor of queries is part of that of the scores."""
    raw = with_defaults(raw, DEFAULTS)
    count, rope = integer(raw, "num_hidden_layers"), rope_config(raw)
    whole = [(count - 1 - layer) % _PATTERN == 0 for layer in range(count)]
    types = raw.get("layer_types") or ["full_attention" if each else "sliding_attention" for each in whole]
    thetas = raw.get("layer_rope_theta") or [0 if each else rope.theta for each in whole]
    if len(thetas) != count:
        raise CheckpointError(f"config.json: layer_rope_theta must have {count} numbers, found {len(thetas)}")
    others = set(thetas) - {0, rope.theta}
    if others:
        raise UnsupportedModelError(
            f"layer_rope_theta {min(others)} beside the rope's theta {rope.theta} is not supported; it is 0 "
            "or the same"
        )
    normalised = decoder_config(
        {**raw, "hidden_act": raw["hidden_activation"]},
        scores=("final_logit_softcapping",),
        windows=layer_windows(types, raw["sliding_window"]),
        ropes=[rope if theta else None for theta in thetas],
    )
    return dataclasses.replace(
        normalised,
        attention_scale=normalised.attention_scale * number(raw, "qk_scale_factor"),
        post_norm_eps=number(raw, "post_norm_eps"),
        logits_scale=number(raw, "output_multiplier"),
    )


def build(net: Decoder, prefix: str = "model") -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    embedding_name = f"{prefix}.embed_tokens"
    x = layers.embedding(net, embedding_name)
    with net.scope(embedding_name):
        x = layers.plain_rms_norm(net, x, c.hidden_size)
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            y = attention(net, layer, norm(net, "input_layernorm", x))
            x = net.op("Add", x, _post_norm(net, "post_attention_layernorm", y))
            y = layers.gated_mlp(net, layer, norm(net, "pre_feedforward_layernorm", x))
            x = net.op("Add", x, _post_norm(net, "post_feedforward_layernorm", y))
    x = layers.rms_norm(net, f"{prefix}.norm", x)
    with net.scope("lm_head"):
        x = layers.scaled(net, x, c.logits_scale)
    return layers.lm_head(net, x, embedding_name=embedding_name)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention, times the sigmoid of a gate for each output."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        q, k = _normed_heads(net, "q_norm", q, c.num_heads), _normed_heads(net, "k_norm", k, c.num_kv_heads)
        gate = layers.linear(net, "gate_proj", x, c.hidden_size, c.q_size)
        out = net.op("Mul", layers.attention(net, layer, q, k, v), net.op("Sigmoid", gate))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def _normed_heads(net: Decoder, name: str, x: ir.Value, heads: int) -> ir.Value:
    size = net.config.head_dim
    with net.scope(name):
        normed = layers.plain_rms_norm(net, net.op("Reshape", x, net.ints(0, 0, heads, size)), size)
        return net.op("Reshape", normed, net.ints(0, 0, heads * size))


def _post_norm(net: Decoder, name: str, x: ir.Value) -> ir.Value:
    return layers.rms_norm(net, name, x, view=one_plus, epsilon=net.config.post_norm_eps)
