"""OLMo 2 (arxiv.org/abs/2501.00656): norms behind each part, RMSNorm over all heads of q and k."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.post_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention; the norms of q and k are over all heads together."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        q = layers.rms_norm(net, "q_norm", q, c.q_size)
        k = layers.rms_norm(net, "k_norm", k, c.kv_size)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
