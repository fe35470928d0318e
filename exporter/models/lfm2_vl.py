"""LFM2-VL and LFM2.5-VL (https://arxiv.org/abs/2511.23404): their text decoder, see ``vision/lfm2_vl.py``."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import lfm2


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return lfm2.config(decoder_part(raw))


def decoder_part(raw: RawConfig) -> RawConfig:
    """Return the decoder's part of config.json; whether embeddings are tied is said beside it.

    Raises:
        UnsupportedModelError: the decoder's family is not supported.
    """
    text = text_config(raw, "lfm2")
    if text["model_type"] != "lfm2":
        raise UnsupportedModelError(
            f"'{raw['model_type']}' with the decoder '{text['model_type']}' is not supported; only lfm2"
        )
    return {**text, "tie_word_embeddings": bool(lfm2.renamed(raw).get("tie_word_embeddings", True))}


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("model.vision_tower.", "model.multi_modal_projector.")
    return lfm2.build(net, prefix="model.language_model")
