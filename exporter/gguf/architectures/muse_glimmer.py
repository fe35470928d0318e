"""Muse Glimmer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, by_window, stated
from . import gemma2


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window: those have a rope."""
    types = by_window(stated(config, "windows"), stated(config, "num_hidden_layers"))
    theta = config["rope_theta"]
    if config.get("rope_theta_of_windows", theta) != theta:
        raise UnsupportedModelError(
            "the GGUF file has a rope.freq_base_swa that differs from rope.freq_base, which is not supported"
        )
    if config.get("norms_of_keys", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"the GGUF file scales keys by {config['norms_of_keys']}, which is not supported; 1 is"
        )
    return {
        "layer_types": types,
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0 for kind in types],
        "qk_scale_factor": stated(config, "qk_scale_factor"),
    }


NAME = "muse-glimmer"
ARCHITECTURE = Architecture(
    model_type="muse_glimmer_text",
    rotates_pairs=True,
    inner={**gemma2.NAMES, "attn_gate": "self_attn.gate_proj"},
    norm_offset=1.0,
    plain_norms=("model.norm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    constants={
        "self_attn.q_norm.weight": "qk_scale_factor",
        "self_attn.k_norm.weight": "norms_of_keys",
    },
    keys={
        "attention.sliding_window_pattern": "windows",
        "logit_scale": "output_multiplier",
        "rope.freq_base_swa": "rope_theta_of_windows",
    },
    adapt=_adapt,
)
