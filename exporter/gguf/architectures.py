"""The architectures of GGUF files that are read, as differences from the common names and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Array
from .architecture import Architecture, Join, Tensors, flat, has, in_channels, stated
from .keys import check_types

_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = {
    **_GEMMA,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
}
_GEMMA4_KEYS = {
    "attention.key_length_swa": "head_dim_of_windows",
    "attention.value_length_swa": "value_dim_of_windows",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window_pattern": "windows",
    "attention.value_length": "value_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "rope.dimension_count_swa": "rotary_of_windows",
    "rope.freq_base_swa": "rope_theta_of_windows",
}
_GPT_OSS = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_QWEN_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN_SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_QWEN_SHARED_SHAPES = {"shared_expert_gate.weight": lambda shape: (1, shape[-1])}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GROUPED_KEYS = {
    "expert_gating_func": "gating",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_QWEN3_5 = {
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
_QWEN3_5_KEYS = {
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
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_inner_size",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
_GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "rope.scaling.finetuned": "rotates",
}
_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_HYBRID = {
    **_GRANITE,
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_KIMI = {
    "ssm_beta": "self_attn.b_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}
_LING = {
    **{name: f"attention.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
    "attn_output": "attention.dense",
    "attn_gate": "attention.g_proj",
    "ssm_f_a": "attention.f_proj",
    "ssm_g_a": "attention.g_proj",
}
_NEMOTRON = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_LATENT_KEYS = {
    "attention.key_length_mla": "key_length_of_heads",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length": "value_length",
    "attention.value_length_mla": "value_length_of_heads",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
}
_GEMMA_27B_LAYERS = (46, 62)  # of Gemma 2 and 3
_SOFTMAX, _SIGMOID = 1, 2  # kinds of gates of experts
_GLM_FLASH = (154_880, (47, 48))  # tokens and layers of the files whose gate is a sigmoid without saying so


def _heads_per_group(facts: Mapping[str, Any]) -> Mapping[str, npt.NDArray[np.intp]]:
    """Return the rows of beta and alpha in one projection: by head of keys those of its heads of values."""
    groups, heads = facts.get("ssm.group_count"), facts.get("ssm.time_step_rank")
    if not isinstance(groups, int) or not isinstance(heads, int) or groups < 1 or heads % groups:
        raise CheckpointError(f"the GGUF file has {heads!r} heads of values for {groups!r} groups")
    rows = np.arange(2 * heads).reshape(groups, 2, heads // groups)
    return {"in_proj_b.weight": rows[:, 0].reshape(-1), "in_proj_a.weight": rows[:, 1].reshape(-1)}


def _delta_taps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution that is stored as [1, channels, 1, taps]."""
    return (shape[1], 1, shape[3]) if len(shape) == 4 else shape


def _joined_rows(keys: Array, values: Array) -> Array:
    """Return rows [heads * (plain + value), rank].

    Args:
        keys: [heads, rank, plain].
        values: [heads, value, rank].
    """
    whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return whole.reshape(-1, whole.shape[2])


def _by_window(flags: Any, count: int) -> list[str]:
    """Return the kinds of layers, of which flags tell whether they have a window.

    Raises:
        CheckpointError: there are no flags of all layers.
    """
    if not isinstance(flags, list) or len(flags) < count:
        raise CheckpointError(f"the GGUF file needs a flag for each of {count} layers: which have a window")
    return ["sliding_attention" if flag else "full_attention" for flag in flags[:count]]


def _gemma_scale(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return query_pre_attn_scalar: the head size; for the 27 B models hidden size / heads."""
    if config.get("num_hidden_layers") in _GEMMA_27B_LAYERS:
        return {"query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]}
    return {"query_pre_attn_scalar": config["head_dim"]} if "head_dim" in config else {}


def _gemma3(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the scale of attention; without a window every layer sees the whole context by the same rope.

    Raises:
        UnsupportedModelError: scores of attention have a cap: llama.cpp has none for this architecture.
    """
    if cap := config.get("attn_logit_softcapping"):
        raise UnsupportedModelError(
            f"the GGUF file has gemma3.attn_logit_softcapping = {cap}, and Gemma 3's scores have no cap"
        )
    scale = _gemma_scale(config, tensors)
    if config.get("sliding_window"):
        return scale
    count = stated(config, "num_hidden_layers")
    return {**scale, "sliding_window": None, "layer_types": ["full_attention"] * count}


def _gemma4(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers and their heads, and how many of a head's pairs rotate in full layers.

    Raises:
        UnsupportedModelError: the rope is scaled.
    """
    if config.get("rope_scaling", {}).get("factor", 1.0) not in (0, 1):
        raise UnsupportedModelError("the GGUF file has a Gemma 4 with a scaled rope, which is not supported")
    count, heads = stated(config, "num_hidden_layers"), stated(config, "num_key_value_heads")
    types = _by_window(stated(config, "windows"), count)
    full = types.index("full_attention") if "full_attention" in types else count - 1
    local = types.index("sliding_attention") if "sliding_attention" in types else 0
    by_layer = heads if isinstance(heads, list) else [heads] * count
    widths = stated(config, "intermediate_size")
    widths = widths if isinstance(widths, list) else [widths]
    factors = config.get("rope_factors", {}).get("long_factor")
    embeddings = tensors.get("model.embed_tokens_per_layer.weight")
    ropes: dict[str, Any] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": stated(config, "rope_theta_of_windows")},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 1.0 if factors is None else factors.count(1.0) / len(factors),
            "rope_theta": config["rope_theta"],
        },
    }
    return {
        "layer_types": types,
        "head_dim": stated(config, "head_dim_of_windows"),
        "global_head_dim": stated(config, "head_dim"),
        "num_key_value_heads": by_layer[local],
        "num_global_key_value_heads": by_layer[full],
        "attention_k_eq_v": f"model.layers.{full}.self_attn.v_proj.weight" not in tensors,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) == 2 * min(widths),
        "vocab_size_per_layer_input": config["vocab_size"] if embeddings is None else embeddings.shape[0],
        "rope_parameters": ropes,
        "rope_scaling": None,
        "rope_factors": None,
        "enable_moe_block": bool(config.get("num_experts")),
        "top_k_experts": config.get("num_experts_per_tok"),
        "partial_rotary_factor": None,
    }


def _gpt_oss(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the width of the experts, and that the bounds of yarn are not rounded.

    A file without a scaling has none, and config.json without one has yarn.
    """
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        "intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size")),
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
    }


def _hybrid(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
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


def _qwen3_5(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``_hybrid`` does.

    llama.cpp's converter orders heads of values so that those of equal rank in their groups are together.
    """
    return {**_hybrid(config, tensors), "linear_heads_in_turns": True}


def _lfm2(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the layers' kinds: convolutions have no heads of keys."""
    heads = stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * stated(config, "num_hidden_layers")
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and (not isinstance(context, int) or window < context):
        raise UnsupportedModelError(
            f"the GGUF file has lfm2.attention.sliding_window = {window}, and lfm2 has no windows here"
        )
    return {
        "num_key_value_heads": [number for number in heads if number],
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _check_sigmoid(config: Mapping[str, Any]) -> None:
    """Check the kind of the experts' gate; files of some models do not state it.

    Raises:
        UnsupportedModelError: it is no sigmoid.
    """
    gate = config.get("gating", _SIGMOID)
    if gate not in (0, _SIGMOID):
        raise UnsupportedModelError(f"the GGUF file has the gate of experts {gate}; 2 is supported")


def _lfm2_moe(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``_lfm2`` does, and the gate of the experts, whose weights have a sum of 1."""
    _check_sigmoid(config)
    return {
        **_lfm2(config, tensors),
        "norm_topk_prob": True,
        "use_expert_bias": has(tensors, "feed_forward.expert_bias"),
    }


def _llama(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return Mixtral's family for files with experts, and whether others have biases behind attention."""
    if not config.get("num_experts"):
        return {"mlp_bias": has(tensors, "mlp.up_proj.bias")}
    return {"model_type": "mixtral", "num_local_experts": config["num_experts"]}


def _granite(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the family by the parts of the layers.

    Raises:
        UnsupportedModelError: a model without layers of states has no rope.
    """
    if config.get("rotates") is False:
        raise UnsupportedModelError("the GGUF file has a Granite without a rope, which is not supported")
    shared = config.get("shared_intermediate_size")
    sparse = "granitemoeshared" if shared else "granitemoe"
    return {
        **_granite_factors(config),
        "model_type": sparse if config.get("num_experts") else "granite",
        "num_local_experts": config.get("num_experts"),
        "rotates": None,
    }


def _granite_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's factors: 0, or none, is that of other models."""
    size = config.get("head_dim") or stated(config, "hidden_size") // stated(config, "num_attention_heads")
    return {
        "attention_multiplier": config.get("attention_multiplier") or size**-0.5,
        "embedding_multiplier": config.get("embedding_multiplier") or 1.0,
        "residual_multiplier": config.get("residual_multiplier") or 1.0,
    }


def _granite_hybrid(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers: those with states have no heads of keys."""
    heads, count = stated(config, "num_key_value_heads"), stated(config, "num_hidden_layers")
    heads = heads if isinstance(heads, list) else [heads] * count
    return {
        **_mamba(config, tensors),
        **_granite_factors(config),
        "num_key_value_heads": [number for number in heads if number] or config["num_attention_heads"],
        "layer_types": ["attention" if number else "mamba" for number in heads],
        "mamba_proj_bias": has(tensors, "mamba.in_proj.bias"),
        "num_local_experts": config.get("num_experts", 0),
        "position_embedding_type": "rope" if config.get("rotates", True) else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config.get("intermediate_size")),
        "rotates": None,
    }


def _granite_swa(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window, and which have a rope: all, unless the file says it."""
    count, theta = stated(config, "num_hidden_layers"), config["rope_theta"]
    rotates = config.get("rotating_layers", [True] * count)
    if not isinstance(rotates, list) or len(rotates) < count:
        raise CheckpointError(f"the GGUF file needs a flag for each of {count} layers: which have a rope")
    return {
        **_granite_factors(config),
        "layer_types": _by_window(stated(config, "windows"), count),
        "layer_rope_theta": [theta if flag else 0 for flag in rotates[:count]],
    }


def _muse_glimmer(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window: those have a rope."""
    types = _by_window(stated(config, "windows"), stated(config, "num_hidden_layers"))
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


def _phimoe(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the factor of cosines and sines under the names of the family."""
    scaling = config.get("rope_scaling")
    if scaling:
        factor = scaling.get("attention_factor", 1.0)
        scaling = {**scaling, "short_mscale": factor, "long_mscale": factor}
    return {"num_local_experts": config.get("num_experts"), "rope_scaling": scaling}


def _mellum(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window, and the rope of each kind; llama.cpp scales that of full layers."""
    count, theta = stated(config, "num_hidden_layers"), config["rope_theta"]
    full = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": config.get("rope_theta_of_windows", theta)}
    windows = config.get("windows") if config.get("sliding_window") else [False] * count
    return {
        "norm_topk_prob": True,
        "layer_types": _by_window(windows, count),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_scaling": None,
    }


def _kimi_linear(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``_delta_and_latent`` does, and the number of heads with a state."""
    rates = next((tensor for name, tensor in tensors.items() if name.endswith("self_attn.A_log")), None)
    heads = config["num_attention_heads"] if rates is None else rates.shape[2]
    return {**_delta_and_latent(config, tensors), "linear_num_heads": heads}


def _ling(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return what ``_delta_and_latent`` does, and the bound of the decay, which llama.cpp needs, too.

    Raises:
        UnsupportedModelError: the file states that the decay has none.
    """
    if not config.get("kda_safe_gate", True):
        raise UnsupportedModelError(
            "the GGUF file has a Ling 3 whose decay has no bound, which is not supported"
        )
    return {
        **_delta_and_latent(config, tensors),
        "head_dim": stated(config, "head_dim_of_states"),
        "kda_lower_bound": stated(config, "kda_lower_bound"),
        "num_mtp_layers": 0,
    }


def _delta_and_latent(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the layers' kinds, of which only those with latent attention have heads of keys, and the sizes.

    Raises:
        UnsupportedModelError: the gate of the experts is no sigmoid.
    """
    _check_sigmoid(config)
    count, heads = stated(config, "num_hidden_layers"), stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * count
    rotary = stated(config, "qk_rope_head_dim")
    return {
        "layer_types": ["full_attention" if number else "linear_attention" for number in heads[:count]],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "partial_rotary_factor": None,
        "qk_nope_head_dim": stated(config, "key_length_of_heads") - rotary,
        "v_head_dim": stated(config, "value_length_of_heads"),
        "n_routed_experts": config.get("num_experts"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "n_group": config.get("n_group", 1),
        "topk_group": config.get("topk_group", 1) if config.get("n_group", 1) > 1 else 1,
    }


def _mamba(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of Mamba-2."""
    inner, heads = stated(config, "mamba_inner_size"), stated(config, "mamba_n_heads")
    return {
        "mamba_d_head": inner // max(1, heads),
        "mamba_expand": inner / max(1, stated(config, "hidden_size")),
        "mamba_conv_bias": has(tensors, "conv1d.bias"),
    }


def _nemotron(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return each layer's kind, by its tensors.

    Raises:
        UnsupportedModelError: the experts have a latent size.
    """
    kinds = {"in_proj": "mamba", "q_proj": "attention", "gate": "moe", "up_proj": "mlp"}
    count, types = stated(config, "num_hidden_layers"), []
    for layer in range(count):
        found = [
            kind for name, kind in kinds.items() if f"model.layers.{layer}.mixer.{name}.weight" in tensors
        ]
        if not found:
            raise CheckpointError(f"the GGUF file's layer {layer} has no tensors of a known kind")
        types.append(found[0])
    heads = stated(config, "num_key_value_heads")
    sizes = _mamba(config, tensors)
    widths = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("mixer.up_proj.weight")}
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"the GGUF file has feed-forward layers of several widths: {sorted(widths)}"
        )
    return {
        "layers_block_type": types,
        "partial_rotary_factor": None,  # its attention has no rope
        "num_key_value_heads": max(heads) if isinstance(heads, list) else heads,
        "intermediate_size": next(iter(widths), config["hidden_size"]),
        "mamba_num_heads": config["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": config.get("mamba_n_groups"),
        "ssm_state_size": config.get("mamba_d_state"),
        "conv_kernel": config.get("mamba_d_conv"),
        "use_conv_bias": sizes["mamba_conv_bias"],
        "n_routed_experts": config.get("num_experts"),
        "layer_norm_epsilon": config.get("layer_norm_epsilon", config.get("rms_norm_eps")),
    }


def _latent(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of latent attention, and the family by the gate of its experts.

    Raises:
        UnsupportedModelError: the gate is neither a softmax nor a sigmoid.
    """
    vocab, counts = _GLM_FLASH
    is_flash = config["vocab_size"] == vocab and config.get("num_hidden_layers") in counts
    gate = config.get("gating") or (_SIGMOID if is_flash else _SOFTMAX)
    if gate not in (_SOFTMAX, _SIGMOID):
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
        "model_type": "deepseek_v3" if gate == _SIGMOID else "deepseek_v2",
        "topk_method": "group_limited_greedy" if gate == _SOFTMAX and groups > 1 else "greedy",
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


def _glm4_moe(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the number of layers without those of speculation, and of experts."""
    _check_sigmoid(config)
    return {
        "num_hidden_layers": stated(config, "num_hidden_layers") - config.get("num_nextn_predict_layers", 0),
        "num_nextn_predict_layers": 0,
        "n_routed_experts": config.get("num_experts"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "use_qk_norm": has(tensors, "self_attn.q_norm.weight"),
    }


def _ernie_moe(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return ERNIE's own names of the numbers of experts."""
    return {
        "use_bias": config["attention_bias"],
        "moe_k": config.get("num_experts_per_tok"),
        "moe_num_experts": config.get("num_experts"),
        "moe_num_shared_experts": config.get("n_shared_experts", 0),
        "moe_layer_start_index": config.get("first_k_dense_replace", 0),
        "moe_layer_interval": config.get("moe_layer_interval", 1),
    }


def _olmo2(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return OLMo 3's family for files with a window, whose layers have another rope."""
    window = config.get("sliding_window")
    if not window:
        return {"sliding_window": None}
    count = stated(config, "num_hidden_layers")
    flags = config.get("windows", [(layer + 1) % 4 != 0 for layer in range(count)])
    theta = config["rope_theta"]
    full = {"rope_type": "default", **config.get("rope_scaling", {}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": config.get("rope_theta_of_windows", theta)}
    return {
        "model_type": "olmo3",
        "layer_types": _by_window(flags, count),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_scaling": None,
    }


def _exaone4(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return which layers have a window and a rope; without one all have a rope."""
    count = stated(config, "num_hidden_layers")
    if not config.get("sliding_window"):
        return {"layer_types": ["full_attention"] * count, "sliding_window": 0}
    usual = [(layer + 1) % 4 != 0 for layer in range(count)]
    return {"layer_types": _by_window(config.get("windows", usual), count)}


def _apertus(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the activation, and a plain rope where the file has no factors: the default has some."""
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    scaled = config.get("rope_scaling") is not None
    return {"hidden_act": "xielu", **({} if scaled else {"rope_parameters": plain})}


def _phi2(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the width of the feed-forward layer: files state four times the hidden size, whatever it is."""
    up = tensors.get("model.layers.0.mlp.fc1.weight")
    return {} if up is None else {"intermediate_size": up.shape[0]}


def _stablelm(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return whether queries, keys and values have biases, and whether both parts of a layer read one norm.

    The tensors tell the latter, as in llama.cpp, whatever the key says.

    Raises:
        UnsupportedModelError: heads of queries and keys have norms.
    """
    if has(tensors, "self_attn.q_norm.weight"):
        raise UnsupportedModelError(
            "the GGUF file has a StableLM with norms of heads, which is not supported"
        )
    parallel = not has(tensors, "post_attention_layernorm.weight")
    return {"use_qkv_bias": config["attention_bias"], "use_parallel_residual": parallel}


def _minicpm3(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of heads, and the factors that llama.cpp has for the one published model."""
    rotary, heads = stated(config, "qk_rope_head_dim"), stated(config, "num_attention_heads")
    output = tensors.get("model.layers.0.self_attn.o_proj.weight")
    return {
        "qk_nope_head_dim": stated(config, "head_dim") - rotary,
        "v_head_dim": None if output is None else output.shape[1] // heads,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "partial_rotary_factor": None,
    }


def _falcon_h1(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of Mamba-2. llama.cpp's converter multiplies weights by the factors of the parts."""
    parts = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **_mamba(config, tensors),
        "mamba_d_ssm": config["mamba_inner_size"],
        "mamba_rms_norm": has(tensors, "mamba.norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": has(tensors, "mamba.in_proj.bias"),
        **{f"{part}_multiplier": 1.0 for part in parts},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


def _mistral3(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the rope of Ministral 3, and how queries grow beyond the trained length."""
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    trained = config.get("trained_length") or config.get("max_position_embeddings")
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    scale = config.get("yarn_log_multiplier", 0.0)
    if scale and rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": scale}
    rope |= {"rope_theta": config["rope_theta"], "llama_4_scaling_beta": config.get("growth", 0.0)}
    return {"rope_parameters": rope, "rope_scaling": None}


_KEYS_AND_VALUES = {
    "kv_b_proj.weight": Join(
        ("k_b_proj.weight", "v_b_proj.weight"),
        lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]),
        _joined_rows,
    )
}
_QWEN3_5_MOE = Architecture(
    model_type="qwen3_5_moe_text",
    inner={**_QWEN3_5, **_QWEN_SHARED},
    parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    views={"linear_attn.A_log": lambda rates: np.log(-rates)},
    shapes={"linear_attn.conv1d.weight": in_channels, **_QWEN_SHARED_SHAPES},
    norm_offset=1.0,
    plain_norms=("linear_attn.norm.weight",),
    experts="mlp.experts",
    keys={**_QWEN3_5_KEYS, **_QWEN_SHARED_KEYS},
    adapt=_qwen3_5,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        rotates_pairs=True,
        experts="block_sparse_moe.experts",
        expert_names={"gate": "w1", "up": "w3", "down": "w2"},
        inner={"ffn_gate_inp": "block_sparse_moe.gate"},
        adapt=_llama,
    ),
    "smollm3": Architecture(model_type="smollm3", rotates_pairs=True),
    "arcee": Architecture(
        model_type="arcee",
        rotates_pairs=True,
        adapt=lambda config, tensors: {"mlp_bias": has(tensors, "mlp.up_proj.bias")},
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        experts="mlp.experts",
        inner=_QWEN_SHARED,
        shapes=_QWEN_SHARED_SHAPES,
        keys=_QWEN_SHARED_KEYS,
        # llama.cpp leaves the weights of a token's experts as they are.
        adapt=lambda config, tensors: {"norm_topk_prob": False, "qkv_bias": config["attention_bias"]},
    ),
    # Pictures have positions of three numbers, which are equal for text.
    "qwen2vl": Architecture(model_type="qwen2", keys={"rope.dimension_sections": "mrope_section"}),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3vl": Architecture(
        model_type="qwen3",
        keys={"rope.dimension_sections": "mrope_section", "n_deepstack_layers": "num_deepstack_layers"},
    ),
    # llama.cpp scales the weights of a token's experts to a sum of 1, as all published models do.
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        experts="mlp.experts",
        adapt=lambda config, tensors: {"norm_topk_prob": True},
    ),
    "qwen3vlmoe": Architecture(
        model_type="qwen3_moe",
        experts="mlp.experts",
        keys={"rope.dimension_sections": "mrope_section", "n_deepstack_layers": "num_deepstack_layers"},
        adapt=lambda config, tensors: {"norm_topk_prob": True},
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        inner=_QWEN3_5,
        parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        views={"linear_attn.A_log": lambda rates: np.log(-rates)},
        shapes={"linear_attn.conv1d.weight": in_channels},
        norm_offset=1.0,
        plain_norms=("linear_attn.norm.weight",),
        keys=_QWEN3_5_KEYS,
        adapt=_qwen3_5,
    ),
    "qwen35moe": _QWEN3_5_MOE,
    # The projections are those of Qwen 3.5, but for one of two parts.
    "qwen3next": replace(_QWEN3_5_MOE, rows={"ssm_ba.weight": _heads_per_group}, adapt=_hybrid),
    "lfm2": Architecture(
        model_type="lfm2",
        inner=_LFM2,
        outer={"token_embd_norm": "model.embedding_norm"},
        shapes={"conv.conv.weight": in_channels},
        keys={"shortconv.l_cache": "conv_L_cache"},
        adapt=_lfm2,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        inner=_LFM2,
        outer={"token_embd_norm": "model.embedding_norm"},
        parameters={"exp_probs_b.bias": "feed_forward.expert_bias"},
        shapes={"conv.conv.weight": in_channels},
        experts="feed_forward.experts",
        expert_names={"gate": "w1", "up": "w3", "down": "w2"},
        keys={
            "shortconv.l_cache": "conv_L_cache",
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": "gating",
        },
        adapt=_lfm2_moe,
    ),
    "granite": Architecture(model_type="granite", rotates_pairs=True, keys=_GRANITE_KEYS, adapt=_granite),
    "granitemoe": Architecture(
        model_type="granitemoe",
        rotates_pairs=True,
        inner=_GRANITE,
        experts="block_sparse_moe",
        keys=_GRANITE_KEYS,
        adapt=_granite,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        rotates_pairs=True,
        inner=_GRANITE_HYBRID,
        parameters={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
        views={"mamba.A_log": lambda rates: np.log(-rates)},
        shapes={
            "mamba.conv1d.weight": in_channels,
            **dict.fromkeys(("mamba.A_log", "mamba.D", "mamba.norm.weight"), flat),
        },
        experts="block_sparse_moe",
        keys={**_GRANITE_KEYS, **_MAMBA_KEYS},
        adapt=_granite_hybrid,
    ),
    "granite_swa": Architecture(
        model_type="granite_swa",
        rotates_pairs=True,
        inner={"attn_sinks": "self_attn.sinks"},
        keys={
            **_GRANITE_KEYS,
            "attention.rope_pattern": "rotating_layers",
            "attention.sliding_window_pattern": "windows",
        },
        adapt=_granite_swa,
    ),
    "muse-glimmer": Architecture(
        model_type="muse_glimmer_text",
        rotates_pairs=True,
        inner={**_GEMMA, "attn_gate": "self_attn.gate_proj"},
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
        adapt=_muse_glimmer,
    ),
    "phimoe": Architecture(
        model_type="phimoe",
        inner={"ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        expert_names={"gate": "w1", "up": "w3", "down": "w2"},
        adapt=_phimoe,
    ),
    "mellum": Architecture(
        model_type="mellum",
        experts="mlp.experts",
        keys={
            "attention.sliding_window_pattern": "windows",
            "rope.freq_base_swa": "rope_theta_of_windows",
        },
        adapt=_mellum,
    ),
    "kimi-linear": Architecture(
        model_type="kimi_linear",
        inner={**_LATENT, **_KIMI},
        parameters={
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        },
        views={"self_attn.A_log": lambda rates: np.log(-rates)},
        shapes={"conv1d.weight": _delta_taps},
        experts="block_sparse_moe.experts",
        expert_names={"gate": "w1", "up": "w3", "down": "w2"},
        joined=_KEYS_AND_VALUES,
        own_heads=True,
        keys={
            **_LATENT_KEYS,
            **_GROUPED_KEYS,
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        adapt=_kimi_linear,
    ),
    "bailingmoe3": Architecture(
        model_type="bailing_hybrid",
        inner={
            **{
                name: module.replace("self_attn", "attention")
                for name, module in (*_LATENT.items(), *_KIMI.items())
                if module.startswith("self_attn")
            },
            **_LING,
            **_SHARED,
        },
        outer={"token_embd": "model.word_embeddings"},
        parameters={
            "ssm_a": "attention.A_log",
            "ssm_dt.bias": "attention.dt_bias",
            "exp_probs_b.bias": "mlp.gate.expert_bias",
        },
        views={"attention.A_log": np.log},
        shapes={"conv1d.weight": _delta_taps, "attention.A_log": flat},
        experts="mlp.experts",
        joined=_KEYS_AND_VALUES,
        own_heads=True,
        keys={
            **_LATENT_KEYS,
            **_GROUPED_KEYS,
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "kda.gate_lower_bound": "kda_lower_bound",
            "kda.head_dim": "head_dim_of_states",
            "kda.safe_gate": "kda_safe_gate",
            "nextn_predict_layers": "num_nextn_predict_layers",
            "ssm.conv_kernel": "short_conv_kernel_size",
        },
        adapt=_ling,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            model_type="nemotron_h",
            inner=_NEMOTRON,
            outer={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
            parameters={
                "ssm_a": "mixer.A_log",
                "ssm_d": "mixer.D",
                "ssm_dt.bias": "mixer.dt_bias",
                "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            },
            views={"mixer.A_log": lambda rates: np.log(-rates)},
            shapes={
                "mixer.conv1d.weight": in_channels,
                **dict.fromkeys(("mixer.A_log", "mixer.D", "mixer.norm.weight"), flat),
            },
            experts="mixer.experts",
            keys={
                **_MAMBA_KEYS,
                **_GROUPED_KEYS,
                "attention.layer_norm_epsilon": "layer_norm_epsilon",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            },
            adapt=_nemotron,
        ),
    ),
    "deepseek2": Architecture(
        model_type="deepseek_v2",
        inner={**_LATENT, **_SHARED},
        parameters=_CORRECTION,
        experts="mlp.experts",
        joined=_KEYS_AND_VALUES,
        own_heads=True,
        keys={**_LATENT_KEYS, **_GROUPED_KEYS},
        adapt=_latent,
    ),
    "glm4": Architecture(
        model_type="glm4",
        inner={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        inner={**_SHARED, "post_attention_norm": "post_attention_layernorm"},
        parameters=_CORRECTION,
        experts="mlp.experts",
        keys={**_GROUPED_KEYS, "nextn_predict_layers": "num_nextn_predict_layers"},
        adapt=_glm4_moe,
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", adapt=lambda config, tensors: {"use_bias": config["attention_bias"]}
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        inner=_SHARED,
        parameters={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        shapes={"moe_statics.e_score_correction_bias": lambda shape: (1, shape[-1])},
        experts="mlp.experts",
        keys={
            **_GROUPED_KEYS,
            "interleave_moe_layer_step": "moe_layer_interval",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        adapt=_ernie_moe,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        inner=_NORMS_BEHIND,
        keys={
            "attention.sliding_window_pattern": "windows",
            "rope.freq_base_swa": "rope_theta_of_windows",
        },
        adapt=_olmo2,
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        experts="mlp.experts",
        adapt=lambda config, tensors: {"norm_topk_prob": False},
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        inner=_NORMS_BEHIND,
        keys={"attention.sliding_window_pattern": "windows"},
        adapt=_exaone4,
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        inner={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        inner={"post_attention_norm": "post_attention_layernorm"},
        adapt=lambda config, tensors: {"attention_out_bias": has(tensors, "self_attn.o_proj.bias")},
    ),
    "mistral3": Architecture(
        model_type="ministral3",
        rotates_pairs=True,
        keys={
            "attention.temperature_scale": "growth",
            "rope.scaling.original_context_length": "trained_length",
            "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
        },
        adapt=_mistral3,
    ),
    "falcon-h1": Architecture(
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
        keys=_MAMBA_KEYS,
        adapt=_falcon_h1,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        inner={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        adapt=lambda config, tensors: {"use_bias": config["attention_bias"]},
    ),
    "apertus": Architecture(
        model_type="apertus",
        inner={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        numbers={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
        adapt=_apertus,
    ),
    "phi2": Architecture(
        model_type="phi",
        inner={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outer={"output_norm": "model.final_layernorm"},
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        adapt=_phi2,
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        keys={
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        adapt=_stablelm,
    ),
    "minicpm3": Architecture(
        model_type="minicpm3", inner=_LATENT, own_heads=True, keys=_LATENT_KEYS, adapt=_minicpm3
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        keys={
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "logit_scale": "logit_scale",
        },
        # llama.cpp takes 0 for none.
        adapt=lambda config, tensors: {"logit_scale": config.get("logit_scale") or 1.0},
    ),
    "phi3": Architecture(model_type="phi3", inner={"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": Architecture(model_type="gpt_oss", inner=_GPT_OSS, experts="mlp.experts", adapt=_gpt_oss),
    "gemma": Architecture(model_type="gemma", norm_offset=1.0),
    "gemma2": Architecture(model_type="gemma2", inner=_GEMMA, norm_offset=1.0, adapt=_gemma_scale),
    "gemma3": Architecture(
        model_type="gemma3_text",
        inner=_GEMMA,
        norm_offset=1.0,
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        adapt=_gemma3,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        inner=_GEMMA4,
        outer={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        parameters={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        experts="experts",
        own_factors=True,
        own_heads=True,
        keys=_GEMMA4_KEYS,
        adapt=_gemma4,
    ),
}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file.

    Raises:
        CheckpointError: the metadata has no architecture, or a key of it has the wrong type.
        UnsupportedModelError: the architecture is not supported.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError("the GGUF file has no 'general.architecture'")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture '{name}' are not supported; these are: "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the model's safetensors checkpoint"
        )
    if metadata.get(f"{name}.expert_count") and not ARCHITECTURES[name].experts:
        raise UnsupportedModelError(
            f"GGUF files of the architecture '{name}' with a mixture of experts are not supported; "
            "take the model's safetensors checkpoint"
        )
    check_types(metadata, name, ARCHITECTURES[name].keys)
    return ARCHITECTURES[name]
