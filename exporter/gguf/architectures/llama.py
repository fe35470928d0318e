"""Llama and Mistral, and Mixtral, whose files have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors, has


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return Mixtral's family for files with experts, and whether others have biases behind attention."""
    if not config.get("num_experts"):
        return {"mlp_bias": has(tensors, "mlp.up_proj.bias")}
    return {"model_type": "mixtral", "num_local_experts": config["num_experts"]}


NAME = "llama"
ARCHITECTURE = Architecture(
    model_type="llama",
    rotates_pairs=True,
    experts="block_sparse_moe.experts",
    expert_names={"gate": "w1", "up": "w3", "down": "w2"},
    inner={"ffn_gate_inp": "block_sparse_moe.gate"},
    adapt=_adapt,
)
