"""Youtu-LLM: latent attention of DeepSeek-V3, dense feed-forward layers."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, integer, with_defaults
from ..decoder import Decoder
from . import deepseek_v3
from .deepseek_v2 import attention

DEFAULTS: RawConfig = {"max_position_embeddings": 131_072, "tie_word_embeddings": True}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json."""
    raw = {"q_lora_rank": 1536, **raw}
    dense = {"first_k_dense_replace": integer(raw, "num_hidden_layers")}
    return deepseek_v3.config({**raw, **with_defaults(raw, DEFAULTS), **dense})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp)
