"""Gemma 4 multimodal checkpoints: their text decoder, without the vision and audio towers."""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import gemma4_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return gemma4_text.config(text_config(raw, "gemma4_text"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    return gemma4_text.build(net, "model.language_model")
