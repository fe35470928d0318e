"""Seed-OSS."""

from __future__ import annotations

from ..architecture import Architecture, has

NAME = "seed_oss"
ARCHITECTURE = Architecture(
    model_type="seed_oss",
    inner={"post_attention_norm": "post_attention_layernorm"},
    adapt=lambda config, tensors: {"attention_out_bias": has(tensors, "self_attn.o_proj.bias")},
)
