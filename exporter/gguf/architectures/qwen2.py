"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen2"
ARCHITECTURE = Architecture(model_type="qwen2")
