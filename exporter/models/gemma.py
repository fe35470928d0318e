"""Gemma: Llama with a scaled embedding, and norms whose weights are stored minus 1."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder
from .gemma3_text import norm
from .llama import attention

DEFAULTS: RawConfig = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Its ``hidden_act`` of "gelu", in the first files, meant the tanh form."""
    raw = with_defaults(raw, DEFAULTS)
    act = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    return dataclasses.replace(
        decoder_config({**raw, "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}),
        embedding_scale=math.sqrt(raw["hidden_size"]),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("rotary_emb.inv_freq")  # stored by old versions of transformers
    x = layers.scaled(net, layers.embedding(net, "model.embed_tokens"), net.config.embedding_scale)
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            x = net.op("Add", x, attention(net, layer, norm(net, "input_layernorm", x)))
            x = net.op("Add", x, layers.gated_mlp(net, layer, norm(net, "post_attention_layernorm", x)))
    return layers.lm_head(net, norm(net, "model.norm", x), embedding_name="model.embed_tokens")
