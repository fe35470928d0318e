"""Phi 3."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "phi3"
ARCHITECTURE = Architecture(model_type="phi3", inner={"ffn_up": "mlp.gate_up_proj"})
