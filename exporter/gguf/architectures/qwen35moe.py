"""Qwen3.5 with experts."""

from __future__ import annotations

import numpy as np

from ..architecture import Architecture, in_channels
from . import qwen2moe, qwen35

NAME = "qwen35moe"
ARCHITECTURE = Architecture(
    model_type="qwen3_5_moe_text",
    inner={**qwen35.NAMES, **qwen2moe.SHARED},
    parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    views={"linear_attn.A_log": lambda rates: np.log(-rates)},
    shapes={"linear_attn.conv1d.weight": in_channels, **qwen2moe.SHARED_SHAPES},
    norm_offset=1.0,
    plain_norms=("linear_attn.norm.weight",),
    experts="mlp.experts",
    keys={**qwen35.KEYS, **qwen2moe.SHARED_KEYS},
    adapt=qwen35.adapt,
)
