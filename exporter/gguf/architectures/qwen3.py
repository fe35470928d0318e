"""Qwen3."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen3"
ARCHITECTURE = Architecture(model_type="qwen3")
