"""GLM 4 (0414): norms in front of and behind each part, a partial rope that rotates adjacent elements."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, rope_config, with_defaults
from ..decoder import Decoder
from .phi3 import mlp

DEFAULTS: RawConfig = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    rope = rope_config(raw, interleaved=True)
    return decoder_config(raw, ropes=[rope] * integer(raw, "num_hidden_layers"))


def build(net: Decoder, prefix: str = "model") -> ir.Value:
    """Write the decoder and return its logits."""
    x = layers.embedding(net, f"{prefix}.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            y = attention(net, layer, layers.rms_norm(net, "input_layernorm", x))
            x = net.op("Add", x, layers.rms_norm(net, "post_self_attn_layernorm", y))
            y = mlp(net, layer, layers.rms_norm(net, "post_attention_layernorm", x))
            x = net.op("Add", x, layers.rms_norm(net, "post_mlp_layernorm", y))
    x = layers.rms_norm(net, f"{prefix}.norm", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}.embed_tokens")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)
