"""StableLM 3B, 1.6B and 12B: Llama with LayerNorm, a partial rope and, in 12B, norms of q and k heads."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``use_qkv_bias`` becomes ``attention_bias``."""
    raw = with_defaults(raw, DEFAULTS)
    renamed = {"rms_norm_eps": raw["layer_norm_eps"], "attention_bias": raw["use_qkv_bias"]}
    normalised = decoder_config({**raw, **renamed})
    return dataclasses.replace(normalised, parallel_residual=bool(raw.get("use_parallel_residual")))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("rotary_emb.inv_freq")
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = layers.layer_norm(net, "input_layernorm", x)
            attended = net.op("Add", x, attention(net, layer, y))
            if not net.config.parallel_residual:
                y = layers.layer_norm(net, "post_attention_layernorm", attended)
            x = net.op("Add", attended, layers.gated_mlp(net, layer, y))
    x = layers.layer_norm(net, "model.norm", x)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        if net.qualified("q_layernorm.norms.0.weight") in net.checkpoint:  # qk_layernorm
            q = _head_norms(net, "q_layernorm", q, c.num_heads)
            k = _head_norms(net, "k_layernorm", k, c.num_kv_heads)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)


def _head_norms(net: Decoder, name: str, x: ir.Value, heads: int) -> ir.Value:
    """Apply LayerNorm to each head; every head has its own weight, and there is no bias."""
    size = net.config.head_dim
    with net.scope(name):
        weights = [net.weight(f"norms.{head}.weight", size) for head in range(heads)]
        by_head = net.op("Reshape", x, net.ints(0, 0, heads, size))
        ones = net.constant(np.ones(size), np.float32, "ones")
        normed = net.op("LayerNormalization", by_head, ones, axis=-1, epsilon=net.config.norm_eps)
        weight = net.op("Reshape", net.op("Concat", *weights, axis=0), net.ints(heads, size))
        return net.op("Reshape", net.op("Mul", normed, weight), net.ints(0, 0, heads * size))
