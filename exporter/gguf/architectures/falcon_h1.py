"""Falcon-H1: attention and Mamba-2 side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..architecture import Architecture, Tensors, flat, has, in_channels
from . import nemotron_h


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of Mamba-2. llama.cpp's converter multiplies weights by the factors of the parts."""
    parts = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **nemotron_h.mamba_sizes(config, tensors),
        "mamba_d_ssm": config["mamba_inner_size"],
        "mamba_rms_norm": has(tensors, "mamba.norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": has(tensors, "mamba.in_proj.bias"),
        **{f"{part}_multiplier": 1.0 for part in parts},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


NAME = "falcon-h1"
ARCHITECTURE = Architecture(
    model_type="falcon_h1",
    inner={
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    outer={"output_norm": "model.final_layernorm"},
    parameters={
        "ffn_norm": "pre_ff_layernorm.weight",
        "ssm_a": "mamba.A_log",
        "ssm_d": "mamba.D",
        "ssm_dt.bias": "mamba.dt_bias",
    },
    views={"mamba.A_log": lambda rates: np.log(-rates)},
    shapes={
        "mamba.conv1d.weight": in_channels,
        **dict.fromkeys(("mamba.A_log", "mamba.D", "mamba.norm.weight"), flat),
    },
    keys=nemotron_h.MAMBA_KEYS,
    adapt=_adapt,
)
