"""Gemma 4 12B, multimodal checkpoints: their text decoder, without the embedders of pictures and sound."""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import gemma4_text, gemma4_unified_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return gemma4_unified_text.config(text_config(raw, "gemma4_unified_text"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_embedder", "embed_vision", "embed_audio")
    return gemma4_text.build(net, "model.language_model")
