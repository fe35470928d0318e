"""gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import Architecture, Tensors

_NAMES = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the width of the experts, and that the bounds of yarn are not rounded.

    A file without a scaling has none, and config.json without one has yarn.
    """
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        "intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size")),
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
    }


NAME = "gpt-oss"
ARCHITECTURE = Architecture(model_type="gpt_oss", inner=_NAMES, experts="mlp.experts", adapt=_adapt)
