"""Phi 3.5 MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the factor of cosines and sines under the names of the family."""
    scaling = config.get("rope_scaling")
    if scaling:
        factor = scaling.get("attention_factor", 1.0)
        scaling = {**scaling, "short_mscale": factor, "long_mscale": factor}
    return {"num_local_experts": config.get("num_experts"), "rope_scaling": scaling}


NAME = "phimoe"
ARCHITECTURE = Architecture(
    model_type="phimoe",
    inner={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts",
    expert_names={"gate": "w1", "up": "w3", "down": "w2"},
    adapt=_adapt,
)
