"""Llama 1 to 3, and checkpoints of other models with the same architecture."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder
from ..layers import draft_heads


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("mtp.")  # see ``draft_head``
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def draft_head(net: Decoder) -> ir.Value:
    """Write a head with the names of Qwen 3.5 and a layer of Llama, and return its logits."""
    layer = partial(layers.pre_norm_layer, attention=attention, mlp=layers.gated_mlp)
    return draft_heads.draft_head(net, draft_heads.MTP, norm=layers.rms_norm, layer=layer)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        bias = c.attention_bias if c.output_bias is None else c.output_bias
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=bias)
