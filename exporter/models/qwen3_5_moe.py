"""Qwen 3.5, 3.6 and 3.8 with experts, multimodal checkpoints: their text decoder."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig, text_config
from . import qwen3_5_moe_text
from .qwen3_5 import build, draft_head, seeing

__all__ = ["build", "config", "draft_head"]


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes the decoder."""
    text = text_config(raw, "qwen3_5_moe_text")
    return seeing(qwen3_5_moe_text.config(text), text)
