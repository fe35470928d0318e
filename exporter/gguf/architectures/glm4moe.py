"""GLM-4.5 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors, has, stated
from . import deepseek2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the number of layers without those of speculation, and of experts."""
    deepseek2.check_sigmoid(config)
    return {
        "num_hidden_layers": stated(config, "num_hidden_layers") - config.get("num_nextn_predict_layers", 0),
        "num_nextn_predict_layers": 0,
        "n_routed_experts": config.get("num_experts"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "use_qk_norm": has(tensors, "self_attn.q_norm.weight"),
    }


NAME = "glm4moe"
ARCHITECTURE = Architecture(
    model_type="glm4_moe",
    inner={**deepseek2.SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
    parameters=deepseek2.CORRECTION,
    experts="mlp.experts",
    keys={**deepseek2.GROUPED_KEYS, "nextn_predict_layers": "num_nextn_predict_layers"},
    adapt=_adapt,
)
