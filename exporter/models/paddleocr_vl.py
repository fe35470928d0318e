"""PaddleOCR-VL (https://arxiv.org/abs/2510.14528): its text decoder, a Llama, see ``vision/paddleocr_vl.py``.

Positions of pictures have three axes (M-RoPE); those of text are equal in all three.
"""

from __future__ import annotations

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig, decoder_config, with_defaults
from ..decoder import Decoder
from . import qwen2_vl
from .llama import attention

_SECTIONS, _THETA = (16, 24, 24), 500_000.0
DEFAULTS: RawConfig = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
}


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json. The decoder's fields are beside ``vision_config``, or in ``text_config``."""
    return qwen2_vl.seeing_config(raw, _text, sections=_SECTIONS, theta=_THETA)


def _text(raw: RawConfig) -> DecoderConfig:
    """Normalise the decoder's part; ``use_bias`` is for all projections."""
    raw = with_defaults(raw, DEFAULTS)
    return decoder_config({**raw, "attention_bias": raw["use_bias"], "mlp_bias": raw["use_bias"]})


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual.", "mlp_AR.", "model.visual.", "model.projector.")
    prefix = qwen2_vl.text_prefix(net.checkpoint)
    return layers.pre_norm_decoder(net, attention=attention, mlp=layers.gated_mlp, prefix=prefix)
