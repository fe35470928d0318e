"""Idefics3 (https://arxiv.org/abs/2408.12637): its text decoder, a Llama, see ``vision/idefics3.py``."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, text_config
from ..decoder import Decoder
from .llama import attention


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    text = text_config(raw, "llama")
    if text["model_type"] != "llama":
        raise UnsupportedModelError(
            f"'{raw['model_type']}' with the decoder '{text['model_type']}' is not supported; only llama"
        )
    return decoder_config(text)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("model.vision_model.", "model.connector.")
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp, prefix="model.text_model")
