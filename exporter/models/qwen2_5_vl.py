"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923): the decoder of Qwen2-VL, see ``vision/qwen2_5_vl.py``."""

from __future__ import annotations

from .qwen2_vl import build as build
from .qwen2_vl import config as config
