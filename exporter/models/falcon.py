"""Falcon 7B, 11B, 40B and RW: parallel or sequential parts, fused q, k and v, a rope or ALiBi."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .. import layers
from ..config import (
    TRAINED_LENGTHS,
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from .bloom import alibi_slopes

DEFAULTS: RawConfig = {
    "activation": "gelu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": TRAINED_LENGTHS["falcon"],
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json.

    The new decoder architecture (40B) is always parallel and has ``num_kv_heads`` key heads; others have one,
    or with ``multi_query`` false one per query head. As in transformers, ALiBi's slopes are rounded to
    bfloat16, and the scores are scaled after it is added.
    """
    raw = with_defaults(raw, DEFAULTS)
    width, heads = integer(raw, "hidden_size", raw.get("n_embed")), integer(raw, "num_attention_heads")
    newer = bool(raw.get("new_decoder_architecture"))
    kv_heads = integer(raw, "num_kv_heads", heads) if newer else 1 if raw["multi_query"] else heads
    num_layers, bias = integer(raw, "num_hidden_layers"), bool(raw.get("bias"))
    raw = {
        **raw,
        "hidden_size": width,
        "intermediate_size": integer(raw, "ffn_hidden_size", 4 * width),
        "num_key_value_heads": kv_heads,
        "hidden_act": raw["activation"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "attention_bias": bias,
        "mlp_bias": bias,
    }
    slopes = np.array(alibi_slopes(heads)).astype(ml_dtypes.bfloat16).astype(float) * (width // heads) ** -0.5
    normalised = decoder_config(raw, ropes=[None if raw.get("alibi") else rope_config(raw)] * num_layers)
    return dataclasses.replace(
        normalised,
        parallel_residual=newer or bool(raw["parallel_attn"]),
        alibi_slopes=tuple(slopes.tolist()) if raw.get("alibi") else (),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    prefix = "" if "word_embeddings.weight" in net.checkpoint else "transformer."
    x = layers.embedding(net, f"{prefix}word_embeddings")
    for layer in range(net.config.num_layers):
        with net.scope(f"{prefix}h.{layer}"):
            x = _layer(net, layer, x)
    x = layers.layer_norm(net, f"{prefix}ln_f", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}word_embeddings")


def _layer(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    c, names = net.config, ("dense_h_to_4h", "dense_4h_to_h")
    if net.qualified("ln_attn.weight") in net.checkpoint:  # 40B has a norm for each part
        attended = attention(net, layer, layers.layer_norm(net, "ln_attn", x))
        y = layers.layer_norm(net, "ln_mlp", x)
    else:
        y = layers.layer_norm(net, "input_layernorm", x)
        attended = attention(net, layer, y)
    x = net.op("Add", x, attended)
    if not c.parallel_residual:
        y = layers.layer_norm(net, "post_attention_layernorm", x)
    return net.op("Add", x, layers.plain_mlp(net, names, y, bias=c.mlp_bias))


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Grouped-query self-attention."""
    c = net.config
    with net.scope("self_attention"):
        q, k, v = layers.grouped_qkv(net, "query_key_value", x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "dense", out, c.q_size, c.hidden_size, bias=c.attention_bias)
