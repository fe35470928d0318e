"""The decoder of Qwen3-VL with experts."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "qwen3vlmoe"
ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    experts="mlp.experts",
    keys={"rope.dimension_sections": "mrope_section", "n_deepstack_layers": "num_deepstack_layers"},
    adapt=lambda config, tensors: {"norm_topk_prob": True},
)
