"""ERNIE 4.5."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "ernie4_5"
ARCHITECTURE = Architecture(
    model_type="ernie4_5", adapt=lambda config, tensors: {"use_bias": config["attention_bias"]}
)
