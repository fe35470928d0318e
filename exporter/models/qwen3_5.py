"""Qwen 3.5, 3.6 and 3.8, multimodal checkpoints: their text decoder, without the vision tower."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import CheckpointError
from ..config import DecoderConfig, RawConfig
from ..decoder import Decoder
from . import qwen3_5_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return qwen3_5_text.config(text_config(raw))


def text_config(raw: RawConfig) -> RawConfig:
    """Return the fields of the decoder in a multimodal config.json."""
    text, kind = raw.get("text_config"), raw["model_type"]
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json of model_type '{kind}' must hold an object 'text_config'")
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": f"{kind}_text", "tie_word_embeddings": tied}


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual")
    return qwen3_5_text.build(net, "model.language_model")
