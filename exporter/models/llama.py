"""Llama 1 to 3, and checkpoints of other models with the same architecture."""

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
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        bias = c.attention_bias if c.output_bias is None else c.output_bias
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=bias)
