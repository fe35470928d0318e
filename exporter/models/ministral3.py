"""Ministral 3: Mistral whose queries grow with their position beyond the trained length."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, mapping, number, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
ROPE: RawConfig = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw = {**raw, "rope_parameters": ROPE}
    rope = mapping(raw, "rope_parameters", "rope_scaling")
    return dataclasses.replace(
        decoder_config(raw, windows=[raw.get("sliding_window")] * integer(raw, "num_hidden_layers")),
        query_growth=number(rope, "llama_4_scaling_beta", 0.0),
    )


def build(net: Decoder, prefix: str = "model", head_name: str = "lm_head") -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(
        net, attention=attention, mlp=layers.gated_mlp, prefix=prefix, head_name=head_name
    )


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention. A query's factor is 1 + beta * log(1 + floor(position / trained))."""
    c, rope = net.config, net.config.ropes[layer]
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        if c.query_growth and rope is not None:
            positions = net.op("Cast", net.position_ids, to=ir.DataType.FLOAT)
            trained = net.constant(rope.original_max_position_embeddings, np.float32, "trained")
            one = net.constant(1, np.float32, "one")
            turns = net.op("Add", net.op("Floor", net.op("Div", positions, trained)), one)
            growth = net.op("Add", layers.scaled(net, net.op("Log", turns), c.query_growth), one)
            q = net.op("Mul", q, net.op("Unsqueeze", growth, net.ints(-1)))
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
