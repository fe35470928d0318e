"""Arcee."""

from __future__ import annotations

from ..architecture import Architecture, has

NAME = "arcee"
ARCHITECTURE = Architecture(
    model_type="arcee",
    rotates_pairs=True,
    adapt=lambda config, tensors: {"mlp_bias": has(tensors, "mlp.up_proj.bias")},
)
