"""LFM2 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors, has, in_channels
from . import deepseek2, lfm2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``lfm2.adapt`` does, and the gate of the experts, whose weights have a sum of 1."""
    deepseek2.check_sigmoid(config)
    return {
        **lfm2.adapt(config, tensors),
        "norm_topk_prob": True,
        "use_expert_bias": has(tensors, "feed_forward.expert_bias"),
    }


NAME = "lfm2moe"
ARCHITECTURE = Architecture(
    model_type="lfm2_moe",
    inner=lfm2.NAMES,
    outer={"token_embd_norm": "model.embedding_norm"},
    parameters={"exp_probs_b.bias": "feed_forward.expert_bias"},
    shapes={"conv.conv.weight": in_channels},
    experts="feed_forward.experts",
    expert_names={"gate": "w1", "up": "w3", "down": "w2"},
    keys={
        "shortconv.l_cache": "conv_L_cache",
        "leading_dense_block_count": "num_dense_layers",
        "expert_gating_func": "gating",
    },
    adapt=_adapt,
)
