"""Qwen 3.5, 3.6 and 3.8, multimodal checkpoints: their text decoder, see ``vision/qwen3_5.py``."""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, mapping, text_config
from ..decoder import Decoder
from . import qwen2_vl, qwen3_5_text

_SECTIONS = (11, 11, 10)


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    text = text_config(raw, "qwen3_5_text")
    return seeing(qwen3_5_text.config(text), text)


def seeing(config: DecoderConfig, text: RawConfig) -> DecoderConfig:
    """Return the configuration with the axis of positions of each frequency."""
    rope = mapping(text, "rope_parameters", "rope_scaling")
    return qwen2_vl.with_axes(config, rope, _SECTIONS, interleaved=True)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual")
    return qwen3_5_text.build(net, "model.language_model")


def draft_head(net: Decoder) -> ir.Value:
    """Write the head that predicts the token behind the next one, and return its logits."""
    return qwen3_5_text.draft_head(net, "model.language_model")
