"""GLM-OCR: its text decoder, a GLM 4 without biases, see ``vision/glm_ocr.py``.

Positions of pictures have three axes (M-RoPE); those of text are equal in all three. Source: transformers
5.24, models/glm_ocr.
"""

from __future__ import annotations

import onnx_ir as ir

from ..config import DecoderConfig, RawConfig, decoder_config, integer, rope_config, with_defaults
from ..decoder import Decoder
from . import glm4, qwen2_vl

_SECTIONS, _THETA = (8, 12, 12), 10_000.0
DEFAULTS: RawConfig = {
    "vocab_size": 59_392,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    return qwen2_vl.seeing_config(raw, _text, sections=_SECTIONS, theta=_THETA)


def _text(raw: RawConfig) -> DecoderConfig:
    """Normalise the decoder's part. Its projections have no biases, whatever ``attention_bias`` says."""
    raw = {**with_defaults(raw, DEFAULTS), "attention_bias": False}
    rope = rope_config(raw, interleaved=True)
    return decoder_config(raw, ropes=[rope] * integer(raw, "num_hidden_layers"))


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    # The layer behind the last one predicts further tokens in training.
    net.checkpoint.ignore("model.visual.", f"model.language_model.layers.{net.config.num_layers}.")
    return glm4.build(net, "model.language_model")
