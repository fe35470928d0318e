"""Qwen 3.5, 3.6 and 3.8, multimodal checkpoints: their text decoder, without the vision tower."""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import qwen3_5_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return qwen3_5_text.config(text_config(raw, "qwen3_5_text"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual")
    return qwen3_5_text.build(net, "model.language_model")
