"""Ling 3: layers of the delta rule between those of latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import UnsupportedModelError
from ..architecture import Architecture, Tensors, flat, stated
from . import deepseek2, kimi_linear

_NAMES = {
    **{name: f"attention.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
    "attn_output": "attention.dense",
    "attn_gate": "attention.g_proj",
    "ssm_f_a": "attention.f_proj",
    "ssm_g_a": "attention.g_proj",
}


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``delta_and_latent`` does, and the bound of the decay, which llama.cpp needs, too.

    Raises:
        UnsupportedModelError: the file states that the decay has none.
    """
    if not config.get("kda_safe_gate", True):
        raise UnsupportedModelError(
            "the GGUF file has a Ling 3 whose decay has no bound, which is not supported"
        )
    return {
        **kimi_linear.delta_and_latent(config, tensors),
        "head_dim": stated(config, "head_dim_of_states"),
        "kda_lower_bound": stated(config, "kda_lower_bound"),
        "num_mtp_layers": 0,
    }


NAME = "bailingmoe3"
ARCHITECTURE = Architecture(
    model_type="bailing_hybrid",
    inner={
        **{
            name: module.replace("self_attn", "attention")
            for name, module in (*deepseek2.LATENT.items(), *kimi_linear.NAMES.items())
            if module.startswith("self_attn")
        },
        **_NAMES,
        **deepseek2.SHARED_EXPERTS,
    },
    outer={"token_embd": "model.word_embeddings"},
    parameters={
        "ssm_a": "attention.A_log",
        "ssm_dt.bias": "attention.dt_bias",
        "exp_probs_b.bias": "mlp.gate.expert_bias",
    },
    views={"attention.A_log": np.log},
    shapes={"conv1d.weight": kimi_linear.taps, "attention.A_log": flat},
    experts="mlp.experts",
    joined=deepseek2.KEYS_AND_VALUES,
    own_heads=True,
    keys={
        **deepseek2.LATENT_KEYS,
        **deepseek2.GROUPED_KEYS,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "kda.gate_lower_bound": "kda_lower_bound",
        "kda.head_dim": "head_dim_of_states",
        "kda.safe_gate": "kda_safe_gate",
        "nextn_predict_layers": "num_nextn_predict_layers",
        "ssm.conv_kernel": "short_conv_kernel_size",
    },
    adapt=_adapt,
)
