"""Granite 4: layers of Mamba-2 between those of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..architecture import Architecture, Tensors, flat, has, in_channels, stated
from . import granite, granitemoe, nemotron_h

_NAMES = {
    **granitemoe.NAMES,
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers: those with states have no heads of keys."""
    heads, count = stated(config, "num_key_value_heads"), stated(config, "num_hidden_layers")
    heads = heads if isinstance(heads, list) else [heads] * count
    return {
        **nemotron_h.mamba_sizes(config, tensors),
        **granite.factors(config),
        "num_key_value_heads": [number for number in heads if number] or config["num_attention_heads"],
        "layer_types": ["attention" if number else "mamba" for number in heads],
        "mamba_proj_bias": has(tensors, "mamba.in_proj.bias"),
        "num_local_experts": config.get("num_experts", 0),
        "position_embedding_type": "rope" if config.get("rotates", True) else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config.get("intermediate_size")),
        "rotates": None,
    }


NAME = "granitehybrid"
ARCHITECTURE = Architecture(
    model_type="granitemoehybrid",
    rotates_pairs=True,
    inner=_NAMES,
    parameters={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    views={"mamba.A_log": lambda rates: np.log(-rates)},
    shapes={
        "mamba.conv1d.weight": in_channels,
        **dict.fromkeys(("mamba.A_log", "mamba.D", "mamba.norm.weight"), flat),
    },
    experts="block_sparse_moe",
    keys={**granite.KEYS, **nemotron_h.MAMBA_KEYS},
    adapt=_adapt,
)
