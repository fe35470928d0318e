"""LightOnOCR: its text decoder, a Qwen 3, see ``vision/lighton_ocr.py``."""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import qwen3


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder. Its head is tied by default."""
    return qwen3.config(text_config({"tie_word_embeddings": True, **raw}, "qwen3"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_encoder.", "vision_projection.")
    return layers.pre_norm_decoder(
        net, attention=qwen3.attention, mlp=layers.gated_mlp, prefix="model.language_model"
    )
