"""The decoder of Qwen3-VL."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen3vl"
ARCHITECTURE = Architecture(
    model_type="qwen3",
    keys={"rope.dimension_sections": "mrope_section", "n_deepstack_layers": "num_deepstack_layers"},
)
