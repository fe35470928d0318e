"""Nemotron-H: layers of Mamba-2, of attention, and feed-forward ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..architecture import Architecture, Tensors, flat, has, in_channels, stated
from . import deepseek2

MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_inner_size",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
_NAMES = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}


def mamba_sizes(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of Mamba-2."""
    inner, heads = stated(config, "mamba_inner_size"), stated(config, "mamba_n_heads")
    return {
        "mamba_d_head": inner // max(1, heads),
        "mamba_expand": inner / max(1, stated(config, "hidden_size")),
        "mamba_conv_bias": has(tensors, "conv1d.bias"),
    }


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return each layer's kind, by its tensors.

    Raises:
        UnsupportedModelError: the experts have a latent size.
    """
    kinds = {"in_proj": "mamba", "q_proj": "attention", "gate": "moe", "up_proj": "mlp"}
    count, types = stated(config, "num_hidden_layers"), []
    for layer in range(count):
        found = [
            kind for name, kind in kinds.items() if f"model.layers.{layer}.mixer.{name}.weight" in tensors
        ]
        if not found:
            raise CheckpointError(f"the GGUF file's layer {layer} has no tensors of a known kind")
        types.append(found[0])
    heads = stated(config, "num_key_value_heads")
    sizes = mamba_sizes(config, tensors)
    widths = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("mixer.up_proj.weight")}
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"the GGUF file has feed-forward layers of several widths: {sorted(widths)}"
        )
    return {
        "layers_block_type": types,
        "partial_rotary_factor": None,  # its attention has no rope
        "num_key_value_heads": max(heads) if isinstance(heads, list) else heads,
        "intermediate_size": next(iter(widths), config["hidden_size"]),
        "mamba_num_heads": config["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": config.get("mamba_n_groups"),
        "ssm_state_size": config.get("mamba_d_state"),
        "conv_kernel": config.get("mamba_d_conv"),
        "use_conv_bias": sizes["mamba_conv_bias"],
        "n_routed_experts": config.get("num_experts"),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", config.get("rms_norm_eps")),
    }


NAME = "nemotron_h"
ARCHITECTURE = Architecture(
    model_type="nemotron_h",
    inner=_NAMES,
    outer={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    parameters={
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_dt.bias": "mixer.dt_bias",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    },
    views={"mixer.A_log": lambda rates: np.log(-rates)},
    shapes={
        "mixer.conv1d.weight": in_channels,
        **dict.fromkeys(("mixer.A_log", "mixer.D", "mixer.norm.weight"), flat),
    },
    experts="mixer.experts",
    keys={
        **MAMBA_KEYS,
        **deepseek2.GROUPED_KEYS,
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    },
    adapt=_adapt,
)
