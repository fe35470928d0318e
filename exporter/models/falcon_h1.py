"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors of all parts."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, number, with_defaults
from ..decoder import Decoder
from ..layers.mamba import mamba, mamba_config

DEFAULTS: RawConfig = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "mlp_multipliers": (1.0, 1.0),
    "ssm_multipliers": (1.0, 1.0, 1.0, 1.0, 1.0),
    **dict.fromkeys(
        (
            *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "ssm_in_multiplier"),
            *("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"),
        ),
        1.0,
    ),
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    expands = "mamba_d_ssm" in raw and raw["mamba_d_ssm"] is None  # to mamba_expand * hidden_size
    raw = with_defaults(raw, DEFAULTS)
    raw = {**raw, "mamba_d_ssm": None} if expands else raw
    count = integer(raw, "num_hidden_layers")
    state = mamba_config(
        raw,
        norm=bool(raw["mamba_rms_norm"]),
        norm_first=bool(raw["mamba_norm_before_gate"]),
        output_bias=bool(raw["projectors_bias"]),
    )
    gate, inputs, b, c, steps = raw["ssm_multipliers"]
    state = dataclasses.replace(
        state,
        input_scale=number(raw, "ssm_in_multiplier"),
        scales=(float(gate), float(inputs), float(b), float(c), float(steps)),
        output_scale=number(raw, "ssm_out_multiplier"),
    )
    gate_scale, down_scale = raw["mlp_multipliers"]
    return dataclasses.replace(
        decoder_config(raw),
        states=(state,) * count,
        attends=(True,) * count,
        embedding_scale=number(raw, "embedding_multiplier"),
        logits_scale=number(raw, "lm_head_multiplier"),
        attention_scales=(
            number(raw, "attention_in_multiplier"),
            number(raw, "key_multiplier"),
            number(raw, "attention_out_multiplier"),
        ),
        mlp_scales=(float(gate_scale), float(down_scale)),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    x = layers.scaled(net, layers.embedding(net, "model.embed_tokens"), c.embedding_scale)
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = layers.rms_norm(net, "input_layernorm", x)
            attended = attention(net, layer, y)
            with net.scope("mamba"):
                recurrent = mamba(net, layer, y)
            x = net.op("Add", x, net.op("Add", recurrent, attended))
            x = net.op("Add", x, feed_forward(net, layers.rms_norm(net, "pre_ff_layernorm", x)))
    x = layers.rms_norm(net, "model.final_layernorm", x)
    return layers.scaled(net, layers.lm_head(net, x, embedding_name="model.embed_tokens"), c.logits_scale)


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention with factors of the input, the keys and the output."""
    c = net.config
    input_scale, key_scale, output_scale = c.attention_scales
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, layers.scaled(net, x, input_scale), bias=c.attention_bias)
        out = layers.attention(net, layer, q, layers.scaled(net, k, key_scale), v)
        out = layers.linear(net, "o_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)
        return layers.scaled(net, out, output_scale)


def feed_forward(net: Decoder, x: ir.Value) -> ir.Value:
    """Write the gated feed-forward layer with factors of the gate and of the output."""
    c = net.config
    gate_scale, output_scale = c.mlp_scales
    with net.scope("feed_forward"):
        sizes, bias = (c.hidden_size, c.intermediate_size), c.mlp_bias
        gate = layers.scaled(net, layers.linear(net, "gate_proj", x, *sizes, bias=bias), gate_scale)
        up = layers.linear(net, "up_proj", x, *sizes, bias=bias)
        out = net.op("Mul", layers.activation(net, gate), up)
        out = layers.linear(net, "down_proj", out, c.intermediate_size, c.hidden_size, bias=bias)
        return layers.scaled(net, out, output_scale)
