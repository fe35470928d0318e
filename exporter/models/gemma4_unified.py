"""Gemma 4 12B, multimodal checkpoints: their text decoder, without the embedders of pictures and sound."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import CheckpointError
from ..config import DecoderConfig, RawConfig
from ..decoder import Decoder
from . import gemma4_text, gemma4_unified_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json of model_type 'gemma4_unified' must hold an object 'text_config'")
    return gemma4_unified_text.config({"model_type": "gemma4_unified_text", **text})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_embedder", "embed_vision", "embed_audio")
    return gemma4_text.build(net, "model.language_model")
