"""LLaVA-OneVision (https://arxiv.org/abs/2408.03326): a Qwen 2, see ``vision/llava_onevision.py``."""

from __future__ import annotations

from .llava import build as build
from .llava import config as config
