"""Gemma."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "gemma"
ARCHITECTURE = Architecture(model_type="gemma", norm_offset=1.0)
