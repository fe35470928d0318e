"""Gemma 3, text: local and global layers with different ropes, four norms per layer, a scaled embedding."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import (
    SCORES,
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from ..weights import Array

DEFAULTS: RawConfig = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    pattern = integer(raw, "sliding_window_pattern")
    types = raw.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    ropes = raw.get("rope_parameters") or {"full_attention": raw.get("rope_scaling")}
    local = {"rope_theta": raw["rope_local_base_freq"], **(ropes.get("sliding_attention") or {})}
    by_type = {
        "full_attention": rope_config(raw, ropes.get("full_attention") or {}),
        "sliding_attention": rope_config(raw, local),
    }
    return decoder_config(
        {**raw, "hidden_act": raw["hidden_activation"]},
        scores=SCORES,
        windows=layer_windows(types, raw["sliding_window"]),
        ropes=[by_type[kind] for kind in types],
    )


def build(net: Decoder, prefix: str = "model", head_name: str = "lm_head") -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    embedding_name = f"{prefix}.embed_tokens"
    x = layers.embedding(net, embedding_name)
    with net.scope(embedding_name):
        scale = net.constant(math.sqrt(c.hidden_size), np.float32, "embedding_scale")
        x = net.scaled_embedding(net.op("Mul", x, scale))
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            y = attention(net, layer, norm(net, "input_layernorm", x))
            x = net.op("Add", x, norm(net, "post_attention_layernorm", y))
            y = layers.gated_mlp(net, layer, norm(net, "pre_feedforward_layernorm", x))
            x = net.op("Add", x, norm(net, "post_feedforward_layernorm", y))
    x = norm(net, f"{prefix}.norm", x)
    return layers.lm_head(net, x, embedding_name=embedding_name, head_name=head_name)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with RMSNorm of each query and key head."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        q = layers.head_norm(net, "q_norm", q, c.num_heads, view=one_plus)
        k = layers.head_norm(net, "k_norm", k, c.num_kv_heads, view=one_plus)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def norm(net: Decoder, name: str, x: ir.Value) -> ir.Value:
    """RMSNorm; the checkpoint stores the weight minus 1."""
    return layers.rms_norm(net, name, x, view=one_plus)


def one_plus(weight: Array) -> Array:
    """Return the norm's weight: the stored weight plus 1, float32."""
    return weight.astype(np.float32) + np.float32(1)
