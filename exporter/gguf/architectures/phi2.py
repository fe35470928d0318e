"""Phi 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the width of the feed-forward layer: files state four times the hidden size, whatever it is."""
    up = tensors.get("model.layers.0.mlp.fc1.weight")
    return {} if up is None else {"intermediate_size": up.shape[0]}


NAME = "phi2"
ARCHITECTURE = Architecture(
    model_type="phi",
    inner={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    outer={"output_norm": "model.final_layernorm"},
    keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
    adapt=_adapt,
)
