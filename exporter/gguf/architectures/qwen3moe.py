"""Qwen3 with experts."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen3moe"
# llama.cpp scales the weights of a token's experts to a sum of 1, as all published models do.
ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    experts="mlp.experts",
    adapt=lambda config, tensors: {"norm_topk_prob": True},
)
