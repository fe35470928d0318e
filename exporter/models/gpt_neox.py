"""GPT-NeoX and Pythia: parallel residuals, fused q, k and v of each head, partial rotary embeddings."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    mapping,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10_000.0,
    "use_parallel_residual": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    older = {"partial_rotary_factor": raw["rotary_pct"], "rope_theta": raw["rotary_emb_base"]}
    heads = integer(raw, "num_attention_heads")
    ignored = {
        "num_key_value_heads": heads,
        "head_dim": integer(raw, "hidden_size") // heads,
    }  # in transformers
    if raw.get("head_dim") not in (None, ignored["head_dim"]):  # transformers turns more or less of a head
        raise UnsupportedModelError(
            f"config.json: 'head_dim' {raw['head_dim']!r} must be hidden_size / num_attention_heads, "
            f"{ignored['head_dim']}, for model_type 'gpt_neox'"
        )
    raw = {**older, **raw, "rms_norm_eps": raw["layer_norm_eps"], **ignored}
    rope = rope_config(raw, mapping(raw, "rope_parameters", "rope_scaling"))
    normalised = decoder_config(raw, ropes=[rope] * decoder_config(raw).num_layers)
    return dataclasses.replace(normalised, parallel_residual=bool(raw["use_parallel_residual"]))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    net.checkpoint.ignore("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
    x = layers.embedding(net, "gpt_neox.embed_in")
    for layer in range(c.num_layers):
        with net.scope(f"gpt_neox.layers.{layer}"):
            y = attention(net, layer, layers.layer_norm(net, "input_layernorm", x))
            attended = net.op("Add", x, y)
            z = layers.layer_norm(net, "post_attention_layernorm", x if c.parallel_residual else attended)
            x = net.op("Add", attended, layers.plain_mlp(net, ("dense_h_to_4h", "dense_4h_to_h"), z))
    x = layers.layer_norm(net, "gpt_neox.final_layer_norm", x)
    return layers.lm_head(net, x, embedding_name="gpt_neox.embed_in", head_name="embed_out")


def attention(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Multi-head self-attention."""
    c = net.config
    with net.scope("attention"):
        q, k, v = layers.grouped_qkv(net, "query_key_value", x, bias=c.attention_bias)
        out = layers.attention(net, layer, q, k, v)
        return layers.linear(net, "dense", out, c.q_size, c.hidden_size, bias=c.attention_bias)
