"""Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the rope of Ministral 3, and how queries grow beyond the trained length."""
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    trained = config.get("trained_length") or config.get("max_position_embeddings")
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    scale = config.get("yarn_log_multiplier", 0.0)
    if scale and rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": scale}
    rope |= {"rope_theta": config["rope_theta"], "llama_4_scaling_beta": config.get("growth", 0.0)}
    return {"rope_parameters": rope, "rope_scaling": None}


NAME = "mistral3"
ARCHITECTURE = Architecture(
    model_type="ministral3",
    rotates_pairs=True,
    keys={
        "attention.temperature_scale": "growth",
        "rope.scaling.original_context_length": "trained_length",
        "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
    },
    adapt=_adapt,
)
