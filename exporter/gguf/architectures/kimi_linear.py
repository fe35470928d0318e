"""Kimi Linear: layers of the delta rule between those of latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..architecture import Architecture, Tensors, stated
from . import deepseek2

NAMES = {
    "ssm_beta": "self_attn.b_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}


def taps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution that is stored as [1, channels, 1, taps]."""
    return (shape[1], 1, shape[3]) if len(shape) == 4 else shape


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``delta_and_latent`` does, and the number of heads with a state."""
    rates = next((tensor for name, tensor in tensors.items() if name.endswith("self_attn.A_log")), None)
    heads = config["num_attention_heads"] if rates is None else rates.shape[2]
    return {**delta_and_latent(config, tensors), "linear_num_heads": heads}


def delta_and_latent(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the layers' kinds, of which only those with latent attention have heads of keys, and the sizes.

    Raises:
        UnsupportedModelError: the gate of the experts is no sigmoid.
    """
    deepseek2.check_sigmoid(config)
    count, heads = stated(config, "num_hidden_layers"), stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * count
    rotary = stated(config, "qk_rope_head_dim")
    return {
        "layer_types": ["full_attention" if number else "linear_attention" for number in heads[:count]],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "partial_rotary_factor": None,
        "qk_nope_head_dim": stated(config, "key_length_of_heads") - rotary,
        "v_head_dim": stated(config, "value_length_of_heads"),
        "n_routed_experts": config.get("num_experts"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1) if config.get("n_group", 1) > 1 else 1,
    }


NAME = "kimi-linear"
ARCHITECTURE = Architecture(
    model_type="kimi_linear",
    inner={**deepseek2.LATENT, **NAMES},
    parameters={
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
    views={"self_attn.A_log": lambda rates: np.log(-rates)},
    shapes={"conv1d.weight": taps},
    experts="block_sparse_moe.experts",
    expert_names={"gate": "w1", "up": "w3", "down": "w2"},
    joined=deepseek2.KEYS_AND_VALUES,
    own_heads=True,
    keys={
        **deepseek2.LATENT_KEYS,
        **deepseek2.GROUPED_KEYS,
        "kda.head_dim": "linear_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
    },
    adapt=_adapt,
)
