"""ERNIE 4.5 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors
from . import deepseek2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return ERNIE's own names of the numbers of experts."""
    return {
        "use_bias": config["attention_bias"],
        "moe_k": config.get("num_experts_per_tok"),
        "moe_num_experts": config.get("num_experts"),
        "moe_num_shared_experts": config.get("n_shared_experts", 0),
        "moe_layer_start_index": config.get("first_k_dense_replace", 0),
        "moe_layer_interval": config.get("moe_layer_interval", 1),
    }


NAME = "ernie4_5-moe"
ARCHITECTURE = Architecture(
    model_type="ernie4_5_moe",
    inner=deepseek2.SHARED_EXPERTS,
    parameters={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    shapes={"moe_statics.e_score_correction_bias": lambda shape: (1, shape[-1])},
    experts="mlp.experts",
    keys={
        **deepseek2.GROUPED_KEYS,
        "interleave_moe_layer_step": "moe_layer_interval",
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    adapt=_adapt,
)
