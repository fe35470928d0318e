"""Llama 1 to 3 and everything that took its shape."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    size = net.config.hidden_size
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            attended = attention(net, layer, layers.rms_norm(net, "input_layernorm", x, size))
            x = net.op("Add", x, attended)
            transformed = layers.gated_mlp(
                net, "mlp", layers.rms_norm(net, "post_attention_layernorm", x, size)
            )
            x = net.op("Add", x, transformed)
    x = layers.rms_norm(net, "model.norm", x, size)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    q_size, kv_size, bias = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.attention_bias
    with net.scope("self_attn"):
        q = layers.linear(net, "q_proj", x, c.hidden_size, q_size, bias=bias)
        k = layers.linear(net, "k_proj", x, c.hidden_size, kv_size, bias=bias)
        v = layers.linear(net, "v_proj", x, c.hidden_size, kv_size, bias=bias)
        return layers.linear(
            net, "o_proj", layers.attention(net, layer, q, k, v), q_size, c.hidden_size, bias=bias
        )
