"""The texts of CLIP (https://arxiv.org/abs/2103.00020): a causal encoder, and a projection of its states."""

from __future__ import annotations

import math

import onnx_ir as ir

from ....errors import UnsupportedModelError
from ...config import RawConfig, integer, mapping, with_defaults
from ...weights import Checkpoint
from ..encoder import EncoderConfig, EncoderWriter
from ..pre_norm import CLIP_VECTOR, text_config, text_states
from ..text_form import TextForm

BASE = ""
UNUSED = ("vision_model.", "visual_projection.", "logit_scale", "position_ids")
_TEXT: RawConfig = {
    "vocab_size": 49_408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49_407,
}
_OLD_END = 2  # in files of before transformers 4.32; the token with the highest id is meant


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    size = integer(raw, "projection_dim", CLIP_VECTOR)
    return text_config(raw, _text(raw), labels, size, causal=True)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return its projected states; that of the end token is the vector of a text."""
    c = net.config
    return net.linear("text_projection", text_states(net), c.hidden_size, c.output_size or 0, bias=False)


def text_form(raw: RawConfig, checkpoint: Checkpoint) -> TextForm:
    """Return how texts are read.

    Raises:
        UnsupportedModelError: there are several end tokens.
    """
    text = _text(raw)
    end = text["eos_token_id"]
    if type(end) is not int:
        raise UnsupportedModelError(
            f"CLIP with 'eos_token_id' {end!r} is not supported; supported: one token"
        )
    scale = math.exp(float(checkpoint.tensor("logit_scale", ()).numpy()))
    return TextForm(end_id=integer(text, "vocab_size") - 1 if end == _OLD_END else end, scale=scale)


def _text(raw: RawConfig) -> RawConfig:
    """Return the part of config.json on texts, complete."""
    return with_defaults(mapping(raw, "text_config_dict", "text_config"), _TEXT)
