"""OPT: learned positions, LayerNorm in front of each part or behind it, biases, ReLU."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder

OFFSET = 2  # rows in front of the first position in the table of positions
DEFAULTS: RawConfig = {
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "enable_bias": True,
    "ffn_dim": 3072,
    "layer_norm_elementwise_affine": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    if not raw["layer_norm_elementwise_affine"]:
        raise UnsupportedModelError("OPT with layer_norm_elementwise_affine false is not supported")
    if raw["do_layer_norm_before"] and raw.get("_remove_final_layer_norm"):
        raise UnsupportedModelError("OPT with _remove_final_layer_norm is not supported")
    renamed = {
        "intermediate_size": raw["ffn_dim"],
        "hidden_act": raw["activation_function"],
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": integer(raw, "num_attention_heads"),  # transformers ignores it, and head_dim
        "head_dim": None,
        "attention_bias": raw["enable_bias"],
        "mlp_bias": raw["enable_bias"],
    }
    normalised = decoder_config({**raw, **renamed}, ropes=[None] * integer(raw, "num_hidden_layers"))
    width = integer(raw, "word_embed_proj_dim", normalised.hidden_size)
    return dataclasses.replace(
        normalised, embedding_width=width, norm_first=bool(raw["do_layer_norm_before"])
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    prefix, width = "model.decoder", c.embedding_width or c.hidden_size
    x = layers.embedding(net, f"{prefix}.embed_tokens", width)
    if width != c.hidden_size:
        x = layers.linear(net, f"{prefix}.project_in", x, width, c.hidden_size)
    with net.scope(f"{prefix}.embed_positions"):
        table = net.weight("weight", c.max_position_embeddings + OFFSET, c.hidden_size)
        rows = net.op("Add", net.position_ids, net.constant(OFFSET, np.int64, "offset"))
        x = net.op("Add", x, net.op("Gather", table, rows))
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            x = _layer(net, layer, x)
    if c.norm_first:
        x = layers.layer_norm(net, f"{prefix}.final_layer_norm", x)
    if width != c.hidden_size:
        x = layers.linear(net, f"{prefix}.project_out", x, c.hidden_size, width)
    return layers.lm_head(net, x, embedding_name=f"{prefix}.embed_tokens", width=width)


def _layer(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    if net.config.norm_first:
        x = net.op("Add", x, attention(net, layer, layers.layer_norm(net, "self_attn_layer_norm", x)))
        return net.op("Add", x, mlp(net, layers.layer_norm(net, "final_layer_norm", x)))
    x = layers.layer_norm(net, "self_attn_layer_norm", net.op("Add", x, attention(net, layer, x)))
    return layers.layer_norm(net, "final_layer_norm", net.op("Add", x, mlp(net, x)))


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Multi-head self-attention."""
    c = net.config
    with net.scope("self_attn"):
        q, k, v = layers.qkv(net, x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "out_proj", out, c.q_size, c.hidden_size, bias=c.attention_bias)


def mlp(net: Decoder, x: ir.Value) -> ir.Value:
    """Feed-forward layer."""
    c = net.config
    x = layers.activation(
        net, layers.linear(net, "fc1", x, c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
    )
    return layers.linear(net, "fc2", x, c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
