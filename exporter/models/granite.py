"""Granite 3: Llama with factors of the embedding, the residual sums, the attention and the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from ...errors import CheckpointError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, number, with_defaults
from ..decoder import Decoder
from .llama import attention

Part = Callable[[Decoder, int, ir.Value], ir.Value]

DEFAULTS: RawConfig = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. ``logits_scaling`` divides the logits."""
    raw = with_defaults(raw, DEFAULTS)
    if number(raw, "logits_scaling") <= 0:
        raise CheckpointError(f"config.json: 'logits_scaling' must be above 0, found {raw['logits_scaling']}")
    return dataclasses.replace(
        decoder_config(raw),
        attention_scale=number(raw, "attention_multiplier"),
        embedding_scale=number(raw, "embedding_multiplier"),
        residual_scale=number(raw, "residual_multiplier"),
        logits_scale=1 / number(raw, "logits_scaling"),
    )


def build(net: Decoder, mix: Part = attention, feed: Part = layers.gated_mlp) -> ir.Value:
    """Write the decoder, with layers of ``mix`` and of ``feed``, and return its logits."""
    c = net.config
    x = layers.scaled(net, layers.embedding(net, "model.embed_tokens"), c.embedding_scale)
    for layer in range(c.num_layers):
        with net.scope(f"model.layers.{layer}"):
            y = mix(net, layer, layers.rms_norm(net, "input_layernorm", x))
            x = net.op("Add", x, layers.scaled(net, y, c.residual_scale))
            y = feed(net, layer, layers.rms_norm(net, "post_attention_layernorm", x))
            x = net.op("Add", x, layers.scaled(net, y, c.residual_scale))
    x = layers.rms_norm(net, "model.norm", x)
    logits = layers.lm_head(net, x, embedding_name="model.embed_tokens")
    return layers.scaled(net, logits, c.logits_scale)
