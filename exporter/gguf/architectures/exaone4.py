"""EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import NORMS_BEHIND, Architecture, Tensors, by_window, stated


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window and a rope; without one all have a rope."""
    count = stated(config, "num_hidden_layers")
    if not config.get("sliding_window"):
        return {"layer_types": ["full_attention"] * count, "sliding_window": 0}
    usual = [(layer + 1) % 4 != 0 for layer in range(count)]
    return {"layer_types": by_window(config.get("windows", usual), count)}


NAME = "exaone4"
ARCHITECTURE = Architecture(
    model_type="exaone4",
    inner=NORMS_BEHIND,
    keys={"attention.sliding_window_pattern": "windows"},
    adapt=_adapt,
)
