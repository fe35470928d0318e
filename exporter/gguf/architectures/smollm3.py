"""SmolLM3."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "smollm3"
ARCHITECTURE = Architecture(model_type="smollm3", rotates_pairs=True)
