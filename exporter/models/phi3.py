"""Phi 3 and 4 mini: fused projections, partial rotary embeddings, LongRoPE."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, rope_config, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    # The first checkpoints name longrope "su" or "yarn".
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
    num_layers = integer(raw, "num_hidden_layers")
    return decoder_config(
        raw,
        windows=[raw.get("sliding_window")] * num_layers,
        ropes=[rope_config(raw, parameters)] * num_layers,
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attn"):
        parts = {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}
        q, k, v = layers.split_linear(net, "qkv_proj", parts, x, c.hidden_size)
        return layers.linear(net, "o_proj", layers.attention(net, layer, q, k, v), c.q_size, c.hidden_size)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Gated feed-forward."""
    c = net.config
    with net.scope("mlp"):
        parts = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        gate, up = layers.split_linear(net, "gate_up_proj", parts, x, c.hidden_size)
        product = net.op("Mul", layers.activation(net, gate), up)
        return layers.linear(net, "down_proj", product, c.intermediate_size, c.hidden_size)
