"""LLaVA-NeXT-Video: the decoders of LLaVA 1.5, see ``vision/llava_next_video.py``."""

from __future__ import annotations

from .llava import build as build
from .llava import config as config
