"""Whisper (https://arxiv.org/abs/2212.04356), the decoder: learned positions, attention to sound."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, integer, with_defaults
from ..decoder import Decoder

DEFAULTS: RawConfig = {
    "vocab_size": 51865,
    "d_model": 384,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "activation_function": "gelu",
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 80,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = with_defaults(raw, DEFAULTS)
    width, num_layers = integer(raw, "d_model"), integer(raw, "decoder_layers")
    renamed = {
        "hidden_size": width,
        "intermediate_size": raw["decoder_ffn_dim"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": raw["decoder_attention_heads"],
        "num_key_value_heads": raw["decoder_attention_heads"],
        "head_dim": None,
        "max_position_embeddings": raw["max_target_positions"],
        "hidden_act": raw["activation_function"],
        "rms_norm_eps": 1e-5,
    }
    normalised = decoder_config({**raw, **renamed}, ropes=[None] * num_layers)
    scale = width**0.5 if raw["scale_embedding"] else 1.0
    rows = integer(raw, "max_source_positions")
    return dataclasses.replace(normalised, encoder_width=width, encoder_rows=rows, embedding_scale=scale)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    net.checkpoint.ignore("model.encoder.")
    prefix = "model.decoder"
    x = layers.scaled(net, layers.embedding(net, f"{prefix}.embed_tokens"), c.embedding_scale)
    with net.scope(f"{prefix}.embed_positions"):
        table = net.weight("weight", c.max_position_embeddings, c.hidden_size)
        x = net.op("Add", x, net.op("Gather", table, net.position_ids))
    for layer in range(c.num_layers):
        with net.scope(f"{prefix}.layers.{layer}"):
            x = layers.cross_decoder_layer(net, layer, x, key_bias=False)
    x = layers.layer_norm(net, f"{prefix}.layer_norm", x)
    return layers.lm_head(net, x, embedding_name=f"{prefix}.embed_tokens", head_name="proj_out")
