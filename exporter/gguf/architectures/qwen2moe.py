"""Qwen2 with experts."""

from __future__ import annotations

from ..architecture import Architecture

SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SHARED_SHAPES = {"shared_expert_gate.weight": lambda shape: (1, shape[-1])}


NAME = "qwen2moe"
ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    experts="mlp.experts",
    inner=SHARED,
    shapes=SHARED_SHAPES,
    keys=SHARED_KEYS,
    # llama.cpp leaves the weights of a token's experts as they are.
    adapt=lambda config, tensors: {"norm_topk_prob": False, "qkv_bias": config["attention_bias"]},
)
