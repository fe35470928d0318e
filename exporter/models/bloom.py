"""BLOOM: ALiBi instead of positions, LayerNorm, fused q, k and v of each head, a norm of the embedding."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import TRAINED_LENGTHS, DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "layer_norm_epsilon": 1e-5,
    "seq_length": TRAINED_LENGTHS["bloom"],
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose keys have other names than Llama's."""
    raw = with_defaults(raw, DEFAULTS)
    if raw.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModelError("BLOOM with apply_residual_connection_post_layernorm is not supported")
    width = integer(raw, "hidden_size", raw.get("n_embed"))
    heads = integer(raw, "num_attention_heads", raw.get("n_head"))
    num_layers = integer(raw, "num_hidden_layers", raw.get("n_layer"))
    renamed = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,  # transformers ignores it, and head_dim
        "head_dim": None,
        "max_position_embeddings": raw["seq_length"],
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }
    normalised = decoder_config({**raw, **renamed}, ropes=[None] * num_layers)
    return dataclasses.replace(normalised, alibi_slopes=alibi_slopes(heads))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head (https://arxiv.org/abs/2108.12409, section 3, and its reference code).

    For 2^n heads they are powers of 2^(-8 / 2^n). For other counts, the slopes of the next smaller power of
    two are followed by every second slope of the next larger one.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    # The original checkpoints have no prefix.
    prefix = "" if "word_embeddings.weight" in net.checkpoint else "transformer."
    x = layers.embedding(net, f"{prefix}word_embeddings")
    x = layers.layer_norm(net, f"{prefix}word_embeddings_layernorm", x)
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}h.{layer}"):
            x = net.op("Add", x, attention(net, layer, layers.layer_norm(net, "input_layernorm", x)))
            y = layers.layer_norm(net, "post_attention_layernorm", x)
            x = net.op("Add", x, layers.plain_mlp(net, ("dense_h_to_4h", "dense_4h_to_h"), y))
    x = layers.layer_norm(net, f"{prefix}ln_f", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}word_embeddings")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Multi-head self-attention."""
    c = net.config
    with net.scope("self_attention"):
        q, k, v = layers.grouped_qkv(net, "query_key_value", x, bias=True)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "dense", out, c.q_size, c.hidden_size, bias=True)
