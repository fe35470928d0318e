"""Arcee AFM: Llama with a feed-forward layer without a gate, and squared ReLU."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder
from .llama import attention

DEFAULTS: RawConfig = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    return decoder_config(raw, defaults=DEFAULTS)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=mlp)


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the feed-forward layer."""
    return layers.plain_mlp(net, ("up_proj", "down_proj"), x, bias=net.config.mlp_bias)
