"""The texts of SigLIP (https://arxiv.org/abs/2303.15343): texts of one length, whose padding takes part."""

from __future__ import annotations

import math

import onnx_ir as ir

from ...config import RawConfig, integer, mapping, with_defaults
from ...weights import Checkpoint
from ..encoder import EncoderConfig, EncoderWriter
from ..pre_norm import text_config, text_states
from ..text_form import TextForm, padding_token, tokenizer_settings

BASE = ""
UNUSED = ("vision_model.", "position_ids")
_TEXT: RawConfig = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "pad_token_id": 1,
}


def config(raw: RawConfig, labels: int) -> EncoderConfig:
    """Normalise config.json."""
    text = _text(raw)
    size = integer(text, "projection_size", integer(text, "hidden_size"))
    return text_config(raw, text, labels, size, causal=False)


def build(net: EncoderWriter, raw: RawConfig) -> ir.Value:
    """Write the encoder and return its projected states; that of the last token is the vector of a text."""
    c = net.config
    states = text_states(net)
    with net.scope("text_model"):
        return net.linear("head", states, c.hidden_size, c.output_size or 0)


def text_form(raw: RawConfig, checkpoint: Checkpoint) -> TextForm:
    """Return how texts are read."""
    text, settings = _text(raw), tokenizer_settings(checkpoint.source)
    scale, bias = (float(checkpoint.tensor(f"logit_{name}", (1,)).numpy()[0]) for name in ("scale", "bias"))
    return TextForm(
        length=integer(text, "max_position_embeddings"),
        padding_id=padding_token(checkpoint.source, integer(text, "pad_token_id")),
        pads_left=settings.get("padding_side") == "left",
        lower=settings.get("tokenizer_class") == "Siglip2Tokenizer",
        scale=math.exp(scale),
        bias=bias,
    )


def _text(raw: RawConfig) -> RawConfig:
    """Return the part of config.json on texts, complete."""
    return with_defaults(mapping(raw, "text_config"), _TEXT)
