"""Mistral Small 3.1 and 3.2, Ministral 3, multimodal checkpoints: their text decoder, without vision."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import CheckpointError, UnsupportedModelError
from ..config import DecoderConfig, RawConfig
from ..decoder import Decoder
from . import ministral3, mistral

_FAMILIES = {"mistral": mistral.config, "ministral3": ministral3.config}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes a decoder of Mistral or of Ministral 3."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json of model_type 'mistral3' must hold an object 'text_config'")
    kind = text.get("model_type", "mistral")
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"mistral3 with a decoder of '{kind}' is not supported; supported: {', '.join(_FAMILIES)}"
        )
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return _FAMILIES[kind]({**text, "model_type": kind, "tie_word_embeddings": tied})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("vision_tower", "multi_modal_projector")
    # transformers 4 wrote the first prefix, transformers 5 writes the second.
    if "language_model.model.embed_tokens.weight" in net.checkpoint:
        return ministral3.build(net, "language_model.model", "language_model.lm_head")
    return ministral3.build(net, "model.language_model")
