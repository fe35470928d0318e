"""OLMo 2, and OLMo 3, whose files have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import NORMS_BEHIND, Architecture, Tensors, by_window, stated


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return OLMo 3's family for files with a window, whose layers have another rope."""
    window = config.get("sliding_window")
    if not window:
        return {"sliding_window": None}
    count = stated(config, "num_hidden_layers")
    flags = config.get("windows", [(layer + 1) % 4 != 0 for layer in range(count)])
    theta = config["rope_theta"]
    full = {"rope_type": "default", **config.get("rope_scaling", {}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": config.get("rope_theta_of_windows", theta)}
    return {
        "model_type": "olmo3",
        "layer_types": by_window(flags, count),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_scaling": None,
    }


NAME = "olmo2"
ARCHITECTURE = Architecture(
    model_type="olmo2",
    inner=NORMS_BEHIND,
    keys={
        "attention.sliding_window_pattern": "windows",
        "rope.freq_base_swa": "rope_theta_of_windows",
    },
    adapt=_adapt,
)
