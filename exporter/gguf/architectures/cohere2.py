"""Command R7B and Command A."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "cohere2"
ARCHITECTURE = Architecture(
    model_type="cohere2",
    keys={
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "logit_scale": "logit_scale",
    },
    # llama.cpp takes 0 for none.
    adapt=lambda config, tensors: {"logit_scale": config.get("logit_scale") or 1.0},
)
