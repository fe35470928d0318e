"""Florence-2 (https://arxiv.org/abs/2311.06242): a BART, whose encoder reads a picture and a text.

BART: https://arxiv.org/abs/1910.13461. This is the decoder. The encoder is in ``vision/florence2.py``.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...errors import UnsupportedModelError
from ..config import DecoderConfig, RawConfig, integer, text_config, with_defaults
from ..decoder import Decoder
from .vision_encoder_decoder import bart_config, cross_decoder

_TEXT: RawConfig = {
    "vocab_size": 50265,
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
LANGUAGE = "model.language_model"


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes encoder and decoder of the text."""
    text = text_part(raw)
    normalised = bart_config(text)
    return dataclasses.replace(
        normalised,
        norm_first=False,
        encoder_width=normalised.hidden_size,
        encoder_rows=integer(text, "max_position_embeddings"),
        embedding_scale=embedding_scale(text),
        embedding_norm=True,
    )


def text_part(raw: RawConfig) -> RawConfig:
    """Return the part of config.json on texts, complete.

    Raises:
        UnsupportedModelError: it is of another model than BART.
    """
    text = with_defaults(text_config(raw, "bart"), _TEXT)
    if text["model_type"] != "bart":
        raise UnsupportedModelError(
            f"'florence2' with the text model '{text['model_type']}' is not supported; only bart, as the "
            "checkpoints that transformers reads without code of their own have it"
        )
    return text


def embedding_scale(text: RawConfig) -> float:
    """Return the factor of embeddings."""
    return integer(text, "d_model") ** 0.5 if text["scale_embedding"] else 1.0


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("model.vision_tower.", "model.multi_modal_projector.", f"{LANGUAGE}.encoder.")
    return cross_decoder(net, f"{LANGUAGE}.decoder", f"{LANGUAGE}.shared", "lm_head")
