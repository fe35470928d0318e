"""Mistral Small 3.1 and 3.2, Ministral 3: their text decoder, see ``vision/mistral3.py``."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import DecoderConfig, RawConfig, text_config
from ..decoder import Decoder
from . import ministral3, mistral

_FAMILIES = {"mistral": mistral.config, "ministral3": ministral3.config}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes a decoder of Mistral or of Ministral 3."""
    text = text_config(raw, "mistral")
    kind = text["model_type"]
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"mistral3 with a decoder of '{kind}' is not supported; supported: {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[kind](text)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "multi_modal_projector")
    # transformers 4 wrote the first prefix, transformers 5 writes the second.
    if "language_model.model.embed_tokens.weight" in net.checkpoint:
        return ministral3.build(net, "language_model.model", "language_model.lm_head")
    return ministral3.build(net, "model.language_model")
