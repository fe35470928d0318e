"""InternVL 3 (https://arxiv.org/abs/2504.10479): its text decoder, see ``vision/internvl.py``."""

from __future__ import annotations

from ..config import DecoderConfig, RawConfig
from . import llava
from .llava import build as build


def config(raw: RawConfig) -> DecoderConfig:
    """Normalise config.json, whose ``text_config`` describes a decoder of one of several families."""
    text = {"model_type": "qwen2", **(raw.get("text_config") or {})}
    return llava.config({**raw, "text_config": text} if isinstance(raw.get("text_config"), dict) else raw)
