"""Idefics3 (https://arxiv.org/abs/2408.12637): its text decoder, a Llama, see ``vision/idefics3.py``."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config
from ..decoder import Decoder
from .llama import attention


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json of model_type '{raw['model_type']}' must hold 'text_config'")
    if text.get("model_type", "llama") != "llama":
        raise UnsupportedModelError(
            f"'{raw['model_type']}' with the decoder '{text['model_type']}' is not supported; only llama"
        )
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return decoder_config({**text, "model_type": "llama", "tie_word_embeddings": tied})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("model.vision_model.", "model.connector.")
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp, prefix="model.text_model")
