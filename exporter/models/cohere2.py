"""Cohere Command R7B and A: parallel parts behind one LayerNorm, local layers with a rope, global without."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .. import layers
from ..config import (
    DecoderConfig,
    RawConfig,
    decoder_config,
    integer,
    layer_windows,
    number,
    rope_config,
    with_defaults,
)
from ..decoder import Decoder
from .llama import attention

DEFAULTS: RawConfig = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. Without ``layer_types``, every fourth layer is global."""
    raw = with_defaults(raw, DEFAULTS)
    pattern = integer(raw, "sliding_window_pattern")
    types = raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(integer(raw, "num_hidden_layers"))
    ]
    rope = rope_config(raw, interleaved=True)
    normalised = decoder_config(
        {**raw, "rms_norm_eps": raw["layer_norm_eps"]},
        windows=layer_windows(types, raw["sliding_window"]),
        ropes=[rope if kind == "sliding_attention" else None for kind in types],
    )
    return dataclasses.replace(normalised, logits_scale=number(raw, "logit_scale"), parallel_residual=True)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    x = layers.embedding(net, "model.embed_tokens")
    for layer in range(net.config.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = layers.layer_norm(net, "input_layernorm", x, bias=False)
            x = net.op("Add", net.op("Add", x, attention(net, layer, y)), layers.gated_mlp(net, layer, y))
    x = layers.layer_norm(net, "model.norm", x, bias=False)
    logits = layers.lm_head(net, x, embedding_name="model.embed_tokens")
    return layers.scaled(net, logits, net.config.logits_scale)
