"""Qwen3.5: layers of the delta rule between those of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointError
from ..architecture import Architecture, Tensors, in_channels, stated

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
KEYS = {
    "attention.recurrent_layers": "recurrent_layers",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "rope.dimension_sections": "mrope_section",  # of pictures; the positions of text are equal
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "linear_inner_size",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def kinds_of_layers(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the layers' kinds of Qwen 3.5 and Next, without those of speculation, and the size of a head.

    Raises:
        CheckpointError: a key is missing, or a list is too short.
    """
    speculating = config.get("num_nextn_predict_layers", 0)
    count, heads = stated(config, "num_hidden_layers"), stated(config, "linear_num_value_heads")
    count -= speculating
    fields: dict[str, Any] = {
        "num_hidden_layers": count,
        "linear_value_head_dim": stated(config, "linear_inner_size") // max(1, heads),
    }
    recurrent = config.get("recurrent_layers")
    if recurrent is not None:
        if len(recurrent) < count:
            raise CheckpointError(
                f"the GGUF file's 'attention.recurrent_layers' has {len(recurrent)} values for {count} layers"
            )
        kinds = ("full_attention", "linear_attention")
        fields["layer_types"] = [kinds[bool(each)] for each in recurrent[:count]]
    return fields


def adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``kinds_of_layers`` does.

    llama.cpp's converter orders heads of values so that those of equal rank in their groups are together.
    """
    return {**kinds_of_layers(config, tensors), "linear_heads_in_turns": True}


NAME = "qwen35"
ARCHITECTURE = Architecture(
    model_type="qwen3_5_text",
    inner=NAMES,
    parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    views={"linear_attn.A_log": lambda rates: np.log(-rates)},
    shapes={"linear_attn.conv1d.weight": in_channels},
    norm_offset=1.0,
    plain_norms=("linear_attn.norm.weight",),
    keys=KEYS,
    adapt=adapt,
)
