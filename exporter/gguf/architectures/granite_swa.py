"""Granite with windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import CheckpointError
from ..architecture import Architecture, Tensors, by_window, stated
from . import granite


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window, and which have a rope: all, unless the file says it."""
    count, theta = stated(config, "num_hidden_layers"), config["rope_theta"]
    rotates = config.get("rotating_layers", [True] * count)
    if not isinstance(rotates, list) or len(rotates) < count:
        raise CheckpointError(f"the GGUF file needs a flag for each of {count} layers: which have a rope")
    return {
        **granite.factors(config),
        "layer_types": by_window(stated(config, "windows"), count),
        "layer_rope_theta": [theta if flag else 0 for flag in rotates[:count]],
    }


NAME = "granite_swa"
ARCHITECTURE = Architecture(
    model_type="granite_swa",
    rotates_pairs=True,
    inner={"attn_sinks": "self_attn.sinks"},
    keys={
        **granite.KEYS,
        "attention.rope_pattern": "rotating_layers",
        "attention.sliding_window_pattern": "windows",
    },
    adapt=_adapt,
)
