"""BitNet b1.58: Llama with norms in front of the last projections of attention and of the feed-forward layer.

Its ternary weights are a format of quantization, see ``quantized/bitnet.py``.
"""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "num_key_value_heads": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw, defaults=DEFAULTS)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.rms_norm(net, "attn_sub_norm", layers.attention(net, layer, q, k, v))
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer."""
    c, width = net.config, net.config.mlp_width(layer)
    with net.scope("mlp"):
        gate, up = (layers.linear(net, name, x, c.hidden_size, width) for name in ("gate_proj", "up_proj"))
        inner = net.op("Mul", layers.activation(net, gate), up)
        inner = layers.rms_norm(net, "ffn_sub_norm", inner, width)
        return layers.linear(net, "down_proj", inner, width, c.hidden_size)
