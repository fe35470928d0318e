"""Qwen3-VL (https://arxiv.org/abs/2511.21631): its text decoder, a Qwen 3, see ``vision/qwen3_vl.py``.

Frequencies turn with the three axes of positions in turns, and states of inner layers of the tower are added
behind the first layers.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from .. import layers
from ..config import DecoderConfig, RawConfig
from ..decoder import Decoder
from . import qwen2_vl, qwen3

SECTIONS, THETA = (24, 20, 20), 500_000.0


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    result = qwen2_vl.seeing_config(raw, qwen3.config, sections=SECTIONS, interleaved=True, theta=THETA)
    return replace(result, deep_states=deep_states(raw))


def deep_states(raw: RawConfig) -> int:
    """Return the number of first layers behind which states of the tower are added."""
    vision = raw.get("vision_config")
    layers_ = vision.get("deepstack_visual_indexes", (8, 16, 24)) if isinstance(vision, dict) else ()
    return len(layers_)


def build(net: Decoder) -> ir.Value:
    """Write the decoder and return its logits."""
    net.checkpoint.ignore("visual.", "model.visual.")
    return layers.pre_norm_decoder(
        net,
        attention=qwen3.attention,
        mlp=layers.gated_mlp,
        prefix=qwen2_vl.text_prefix(net.checkpoint),
    )
