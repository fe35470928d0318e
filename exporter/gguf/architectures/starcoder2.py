"""StarCoder 2."""

from __future__ import annotations

from ..architecture import Architecture

NAME = "starcoder2"
ARCHITECTURE = Architecture(
    model_type="starcoder2",
    inner={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    keys={"attention.layer_norm_epsilon": "norm_epsilon"},
    adapt=lambda config, tensors: {"use_bias": config["attention_bias"]},
)
