"""Mellum 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors, by_window, stated


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window, and the rope of each kind; llama.cpp scales that of full layers."""
    count, theta = stated(config, "num_hidden_layers"), config["rope_theta"]
    full = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": config.get("rope_theta_of_windows", theta)}
    windows = config.get("windows") if config.get("sliding_window") else [False] * count
    return {
        "norm_topk_prob": True,
        "layer_types": by_window(windows, count),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_scaling": None,
    }


NAME = "mellum"
ARCHITECTURE = Architecture(
    model_type="mellum",
    experts="mlp.experts",
    keys={
        "attention.sliding_window_pattern": "windows",
        "rope.freq_base_swa": "rope_theta_of_windows",
    },
    adapt=_adapt,
)
