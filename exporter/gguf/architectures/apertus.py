"""Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the activation, and a plain rope where the file has no factors: the default has some."""
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    scaled = config.get("rope_scaling") is not None
    return {"hidden_act": "xielu", **({} if scaled else {"rope_parameters": plain})}


NAME = "apertus"
ARCHITECTURE = Architecture(
    model_type="apertus",
    inner={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    numbers={
        "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
        "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
        "xielu.beta": ("mlp.act_fn.beta", ()),
        "xielu.eps": ("mlp.act_fn.eps", ()),
    },
    adapt=_adapt,
)
