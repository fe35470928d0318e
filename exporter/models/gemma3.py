"""Gemma 3 checkpoints that see: their text decoder, see ``vision/gemma3.py``."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import gemma3_text


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder.

    The tokens of a picture see each other in all layers.
    """
    decoder = gemma3_text.config(text_config(raw, "gemma3_text"))
    return replace(decoder, image_scale=True, image_windows=tuple(dict.fromkeys(decoder.windows)))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "multi_modal_projector")
    # transformers 4 wrote the first prefix, transformers 5 writes the second.
    older = "language_model.model.embed_tokens.weight" in net.checkpoint
    if older:
        return gemma3_text.build(net, "language_model.model", "language_model.lm_head")
    return gemma3_text.build(net, "model.language_model", "lm_head")
