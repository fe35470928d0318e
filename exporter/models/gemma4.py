"""Gemma 4 checkpoints that see: their text decoder, see ``vision/gemma4.py``; audio is left out."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, integer, text_config
from ..decoder import Decoder
from . import gemma4_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder.

    In some models the tokens of a picture see each other in the sliding layers.
    """
    text = text_config(raw, "gemma4_text")
    decoder = gemma4_text.config(text)
    joined = text.get("use_bidirectional_attention") == "vision"
    return replace(
        decoder,
        image_scale=True,
        image_pad=None if decoder.layer_input is None else integer(text, "pad_token_id", 0),
        image_windows=tuple({window for window in decoder.windows if window} if joined else ()),
    )


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    return gemma4_text.build(net, "model.language_model")
