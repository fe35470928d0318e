"""Granite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, stated

KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "rope.scaling.finetuned": "rotates",
}


def adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the family by the parts of the layers.

    Raises:
        UnsupportedModelError: a model without layers of states has no rope.
    """
    if config.get("rotates") is False:
        raise UnsupportedModelError("the GGUF file has a Granite without a rope, which is not supported")
    shared = config.get("shared_intermediate_size")
    sparse = "granitemoeshared" if shared else "granitemoe"
    return {
        **factors(config),
        "model_type": sparse if config.get("num_experts") else "granite",
        "num_local_experts": config.get("num_experts"),
        "rotates": None,
    }


def factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's factors: 0, or none, is that of other models."""
    size = config.get("head_dim") or stated(config, "hidden_size") // stated(config, "num_attention_heads")
    return {
        "attention_multiplier": config.get("attention_multiplier") or size**-0.5,
        "embedding_multiplier": config.get("embedding_multiplier") or 1.0,
        "residual_multiplier": config.get("residual_multiplier") or 1.0,
    }


NAME = "granite"
ARCHITECTURE = Architecture(model_type="granite", rotates_pairs=True, keys=KEYS, adapt=adapt)
