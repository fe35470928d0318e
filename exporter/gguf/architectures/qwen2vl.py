"""The decoder of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen2vl"
# Pictures have positions of three numbers, which are equal for text.
ARCHITECTURE = Architecture(model_type="qwen2", keys={"rope.dimension_sections": "mrope_section"})
