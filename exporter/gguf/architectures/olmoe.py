"""OLMoE."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "olmoe"
ARCHITECTURE = Architecture(
    model_type="olmoe",
    experts="mlp.experts",
    adapt=lambda config, tensors: {"norm_topk_prob": False},
)
