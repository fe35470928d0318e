"""The architectures of GGUF files that are read, as differences from the common names and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from .architecture import Architecture, stated
from .keys import check_types

_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_QWEN3_5 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
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
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_GEMMA_27B_LAYERS = (46, 62)  # of Gemma 2 and 3


def _gemma_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return query_pre_attn_scalar: the head size; for the 27 B models hidden size / heads."""
    if config.get("num_hidden_layers") in _GEMMA_27B_LAYERS:
        return {"query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]}
    return {"query_pre_attn_scalar": config["head_dim"]} if "head_dim" in config else {}


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of attention; without a window every layer sees the whole context by the same rope."""
    scale = _gemma_scale(config)
    if config.get("sliding_window"):
        return scale
    count = stated(config, "num_hidden_layers")
    return {**scale, "sliding_window": None, "layer_types": ["full_attention"] * count}


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of the experts, and that the bounds of yarn are not rounded.

    A file without a scaling has none, and config.json without one has yarn.
    """
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        "intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size")),
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
    }


def _qwen3_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers' kinds, without those of speculation, and the size of a head of values.

    llama.cpp's converter orders heads of values so that those of equal rank in their groups are together.

    Raises:
        CheckpointError: a key is missing, or a list is too short.
    """
    speculating = config.get("num_nextn_predict_layers", 0)
    count, heads = stated(config, "num_hidden_layers"), stated(config, "linear_num_value_heads")
    count -= speculating
    fields: dict[str, Any] = {
        "num_hidden_layers": count,
        "linear_value_head_dim": stated(config, "linear_inner_size") // max(1, heads),
        "linear_heads_in_turns": True,
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


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers' kinds: convolutions have no heads of keys."""
    heads = stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * stated(config, "num_hidden_layers")
    return {
        "num_key_value_heads": [number for number in heads if number],
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", rotates_pairs=True),
    "smollm3": Architecture(model_type="smollm3", rotates_pairs=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    # llama.cpp scales the weights of a token's experts to a sum of 1, as all published models do.
    "qwen3moe": Architecture(
        model_type="qwen3_moe", experts=True, adapt=lambda config: {"norm_topk_prob": True}
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        inner=_QWEN3_5,
        parameters={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        views={"linear_attn.A_log": lambda rates: np.log(-rates)},
        channels=("linear_attn.conv1d.weight",),
        norm_offset=1.0,
        plain_norms=("linear_attn.norm.weight",),
        keys=_QWEN3_5_KEYS,
        adapt=_qwen3_5,
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        inner=_LFM2,
        outer={"token_embd_norm": "model.embedding_norm"},
        channels=("conv.conv.weight",),
        keys={"shortconv.l_cache": "conv_L_cache"},
        adapt=_lfm2,
    ),
    "phi3": Architecture(model_type="phi3", inner={"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": Architecture(model_type="gpt_oss", inner=_GPT_OSS, experts=True, adapt=_gpt_oss),
    "gemma2": Architecture(model_type="gemma2", inner=_GEMMA, norm_offset=1.0, adapt=_gemma_scale),
    "gemma3": Architecture(
        model_type="gemma3_text",
        inner=_GEMMA,
        norm_offset=1.0,
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        adapt=_gemma3,
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
