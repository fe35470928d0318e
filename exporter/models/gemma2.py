"""Gemma 2: alternating local and global layers, four norms per layer, soft caps, a scaled embedding."""

from __future__ import annotations

import math

import onnx_ir as ir

from .. import layers
from ..config import SCORES, DecoderConfig, RawConfig, decoder_config, integer, layer_windows, with_defaults
from ..decoder import Decoder
from .gemma3_text import norm
from .llama import attention

DEFAULTS: RawConfig = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Without ``layer_types``, every other layer is local, from the first on."""
    # An explicit null switches a soft cap off.
    caps = {key: raw[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if key in raw}
    raw = {**with_defaults(raw, DEFAULTS), **caps}
    types = raw.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    return decoder_config(
        {**raw, "hidden_act": raw["hidden_activation"]},
        scores=SCORES,
        windows=layer_windows(types, raw["sliding_window"]),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    c = net.config
    x = layers.embedding(net, "model.embed_tokens")
    with net.scope("model.embed_tokens"):
        x = layers.scaled(net, x, math.sqrt(c.hidden_size))
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = attention(net, layer, norm(net, "input_layernorm", x))
            x = net.op("Add", x, norm(net, "post_attention_layernorm", y))
            y = layers.gated_mlp(net, layer, norm(net, "pre_feedforward_layernorm", x))
            x = net.op("Add", x, norm(net, "post_feedforward_layernorm", y))
    x = norm(net, "model.norm", x)
    return layers.lm_head(net, x, embedding_name="model.embed_tokens")
