"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import UnsupportedModelError
from ....storage.stored_tensor import Array
from ..architecture import Architecture, Join, Tensors, has, stated

SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GROUPED_KEYS = {
    "expert_gating_func": "gating",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
LATENT_KEYS = {
    "attention.key_length_mla": "key_length_of_heads",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length": "value_length",
    "attention.value_length_mla": "value_length_of_heads",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
}
SOFTMAX = 1  # the gates of experts
SIGMOID = 2
_GLM_FLASH = (154_880, (47, 48))  # tokens and layers of the files whose gate is a sigmoid without saying so


def _joined_rows(keys: Array, values: Array) -> Array:
    """Return rows [heads * (plain + value), rank].

    Args:
        keys: [heads, rank, plain].
        values: [heads, value, rank].
    """
    whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return whole.reshape(-1, whole.shape[2])


def check_sigmoid(config: Mapping[str, Any]) -> None:
    """Check the kind of the experts' gate; files of some models do not state it.

    Raises:
        UnsupportedModelError: it is no sigmoid.
    """
    gate = config.get("gating", SIGMOID)
    if gate not in (0, SIGMOID):
        raise UnsupportedModelError(f"the GGUF file has the gate of experts {gate}; 2 is supported")


def _adapt(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of latent attention, and the family by the gate of its experts.

    Raises:
        UnsupportedModelError: the gate is neither a softmax nor a sigmoid.
    """
    vocab, counts = _GLM_FLASH
    is_flash = config["vocab_size"] == vocab and config.get("num_hidden_layers") in counts
    gate = config.get("gating") or (SIGMOID if is_flash else SOFTMAX)
    if gate not in (SOFTMAX, SIGMOID):
        raise UnsupportedModelError(f"the GGUF file has the gate of experts {gate}; 1 and 2 are supported")
    groups, rotary = config.get("n_group", 1), stated(config, "qk_rope_head_dim")
    heads, count = stated(config, "num_attention_heads"), stated(config, "num_hidden_layers")
    experts = config.get("num_experts", 0)
    key = config.get("key_length_of_heads", config.get("head_dim"))
    value = config.get("value_length_of_heads", config.get("value_length"))
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        scale = 10 * config.get("yarn_log_multiplier", 0.0)
        scaling = {**scaling, "mscale": scale, "mscale_all_dim": scale}
        scaling.pop("attention_factor", None)
    return {
        "model_type": "deepseek_v3" if gate == SIGMOID else "deepseek_v2",
        "topk_method": "group_limited_greedy" if gate == SOFTMAX and groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": config.get("topk_group", 1),
        "q_lora_rank": config.get("q_lora_rank", 0),
        "attention_bias": has(tensors, "kv_a_proj_with_mqa.bias"),
        "num_key_value_heads": heads,
        "head_dim": None,
        "partial_rotary_factor": None,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "n_routed_experts": experts,
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "first_k_dense_replace": config.get("first_k_dense_replace", 0) if experts else count,
        "rope_scaling": scaling,
        "rope_interleave": True,
    }


KEYS_AND_VALUES = {
    "kv_b_proj.weight": Join(
        ("k_b_proj.weight", "v_b_proj.weight"),
        lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]),
        _joined_rows,
    )
}


NAME = "deepseek2"
ARCHITECTURE = Architecture(
    model_type="deepseek_v2",
    inner={**LATENT, **SHARED_EXPERTS},
    parameters=CORRECTION,
    experts="mlp.experts",
    joined=KEYS_AND_VALUES,
    own_heads=True,
    keys={**LATENT_KEYS, **GROUPED_KEYS},
    adapt=_adapt,
)
