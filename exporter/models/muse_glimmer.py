"""Muse Glimmer, multimodal checkpoints: their text decoder, without the tower."""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import muse_glimmer_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return muse_glimmer_text.config(text_config(raw, "muse_glimmer_text"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "vision_adapter", "vision_projection", "vision_model")
    return muse_glimmer_text.build(net, "model.language_model")
