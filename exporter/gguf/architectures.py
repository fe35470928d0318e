"""Map GGUF's architectures to Hugging Face's configuration keys and tensor names.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import Array
from .keys import check_keys, check_types

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata of every architecture, without its prefix, and the key of config.json.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
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
_ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")
_BARE = ("self_attn.sinks",)  # parameters whose names have no suffix
_SCALED_WINDOWS = ("gemma2", "gpt-oss")  # whose layers with windows take the factor of the rope as it is
_OTHER_WINDOWS = ("gemma3",)  # whose layers with windows have a rope of their own
_GEMMA_27B_LAYERS = (46, 62)  # of Gemma 2 and 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The differences of one GGUF architecture from the common names.

    Args:
        model_type: the model family, a module of ``exporter/models``.
        inner: names of a layer's modules that differ from the common ones.
        outer: the same of modules outside of layers.
        parameters: names of a layer's parameters that are not a module's weight or bias.
        views: by the end of a name of Hugging Face, the function that makes its tensor of the stored one.
        channels: ends of names of convolutions, whose stored [channels, taps] is [channels, 1, taps].
        plain_norms: ends of names of norms without ``norm_offset``.
        rotates_pairs: whether rows of q and k are ordered for a rope that rotates adjacent elements.
        norm_offset: offset that the file's norm weights include.
        experts: whether its layers are mixtures of experts, whose weights are stacked.
        keys: further metadata, without the prefix, and the keys of config.json.
        adapt: returns keys of config.json that are computed from others.
    """

    model_type: str
    inner: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Callable[[Array], Array]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    plain_norms: tuple[str, ...] = ()
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    experts: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


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
    count = _stated(config, "num_hidden_layers")
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


def _stated(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of config.json that the metadata must give.

    Raises:
        CheckpointError: it gives none.
    """
    if config.get(key) is None:
        raise CheckpointError(f"the GGUF file does not state '{key}'")
    return config[key]


def _qwen3_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers' kinds, without those of speculation, and the size of a head of values.

    llama.cpp's converter orders heads of values so that those of equal rank in their groups are together.

    Raises:
        CheckpointError: a key is missing, or a list is too short.
    """
    speculating = config.get("num_nextn_predict_layers", 0)
    count, heads = _stated(config, "num_hidden_layers"), _stated(config, "linear_num_value_heads")
    count -= speculating
    fields: dict[str, Any] = {
        "num_hidden_layers": count,
        "linear_value_head_dim": _stated(config, "linear_inner_size") // max(1, heads),
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
    heads = _stated(config, "num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * _stated(config, "num_hidden_layers")
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


def tensor_name(name: str, known: Architecture) -> str:
    """Return Hugging Face's name of a tensor; unknown names are unchanged."""
    whole = _BLOCK.fullmatch(name)
    if whole is not None and whole[2] in known.parameters:
        return f"model.layers.{whole[1]}.{known.parameters[whole[2]]}"
    stem, dot, suffix = name.rpartition(".")
    match = _BLOCK.fullmatch(stem)
    if match is None:
        outer = {**_OUTER, **known.outer}
        return f"{outer[stem]}.{suffix}" if stem in outer else name
    inner = {**_INNER, **known.inner}.get(match[2])
    if inner is None:
        return name
    return f"model.layers.{match[1]}.{inner}" + ("" if inner in _BARE else f"{dot}{suffix}")


def config_of(
    metadata: Mapping[str, Any], *, tied: bool, vocab_size: int, biased: bool, by_frequency: bool = False
) -> dict[str, Any]:
    """Return the config.json that corresponds to a file's metadata.

    Args:
        metadata: metadata of the GGUF file.
        tied: whether the head is tied to the embedding.
        vocab_size: number of rows of the embedding.
        biased: whether the projections of attention have a bias.
        by_frequency: whether tensors hold factors of the rope by frequency; attn_factor belongs to them.

    Raises:
        CheckpointError: a key has the wrong type.
        UnsupportedModelError: the architecture, its rope, or a key is not supported.
    """
    known, prefix = architecture(metadata), metadata["general.architecture"]
    keys = {**_KEYS, **known.keys}
    fields = {
        key: metadata[f"{prefix}.{name}"] for name, key in keys.items() if f"{prefix}.{name}" in metadata
    }
    config = {
        "model_type": known.model_type,
        **_unstated(metadata, prefix),
        **fields,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "attention_bias": biased,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **_rope(metadata, prefix, by_frequency=by_frequency),
    }
    check_keys(metadata, prefix, frozenset(keys))
    config |= known.adapt(config)
    for key in ("num_key_value_heads", "intermediate_size"):
        config[key] = _same_in_all_layers(config.get(key), key)
    _check_heads(metadata, prefix)
    return {key: value for key, value in config.items() if value is not None}


def _unstated(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return what llama.cpp takes for keys that a file leaves out; families of config.json take others."""
    heads = metadata.get(f"{prefix}.attention.head_count")
    return {"rope_theta": 10_000.0, "num_key_value_heads": heads, "head_dim": _head_size(metadata, prefix)}


def _head_size(metadata: Mapping[str, Any], prefix: str) -> int | None:
    hidden, heads = (metadata.get(f"{prefix}.{key}") for key in ("embedding_length", "attention.head_count"))
    size = metadata.get(f"{prefix}.attention.key_length")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return size


def _rope(metadata: Mapping[str, Any], prefix: str, *, by_frequency: bool) -> dict[str, Any]:
    """Return the keys of the rotary embedding without the factors by frequency, which are tensors."""
    factor = metadata.get(f"{prefix}.rope.scaling.factor", metadata.get(f"{prefix}.rope.scale_linear"))
    # Files that state only a factor mean a linear one, as llama.cpp reads them.
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none" if factor is None else "linear")
    result: dict[str, Any] = {}
    size = _head_size(metadata, prefix)
    if size:
        result["partial_rotary_factor"] = metadata.get(f"{prefix}.rope.dimension_count", size) / size
    if kind == "none" and factor not in (None, 0, 1) and prefix in _SCALED_WINDOWS:
        raise UnsupportedModelError(
            f"the GGUF file has {prefix}.rope.scaling.factor = {factor} with rope scaling 'none', which is "
            "not supported: llama.cpp scales the positions of layers with windows"
        )
    if kind in ("linear", "yarn"):
        original = metadata.get(f"{prefix}.rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": 1.0 if factor is None else factor}
        result["rope_scaling"] = scaling | (
            {} if original is None else {"original_max_position_embeddings": original}
        )
    if kind == "yarn" and by_frequency:
        raise UnsupportedModelError(
            f"the GGUF file has {prefix}.rope.scaling.type = 'yarn' and factors of the rope by frequency, "
            "which is not supported"
        )
    if kind == "yarn":
        result["rope_scaling"] |= _yarn(metadata, f"{prefix}.rope.scaling", factor or 1.0)
        stated = [metadata.get(f"{prefix}.rope.scaling.{name}", 1.0) for name in _ATTENTION_FACTORS]
        if prefix in _OTHER_WINDOWS and math.prod(stated) != 1.0:
            raise UnsupportedModelError(
                f"the GGUF file has {prefix}.rope.scaling.attn_factor or yarn_attn_factor, which is not "
                "supported: llama.cpp scales also layers with windows"
            )
        return result
    unread = _ATTENTION_FACTORS[1:] if by_frequency else _ATTENTION_FACTORS
    for name in unread:
        if metadata.get(f"{prefix}.rope.scaling.{name}", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"the GGUF file has {prefix}.rope.scaling.{name} with rope scaling '{kind}', which is not "
                "supported; yarn is"
            )
    if kind not in ("none", "linear", "longrope"):
        raise UnsupportedModelError(
            f"the GGUF file has rope scaling '{kind}'; linear, yarn and longrope are supported"
        )
    return result


def _yarn(metadata: Mapping[str, Any], scaling: str, factor: float) -> dict[str, Any]:
    """Return the parameters of YaRN that a file states.

    llama.cpp multiplies cosines and sines by attn_factor, yarn_attn_factor and 1 + 0.1 ln(factor);
    transformers has one ``attention_factor`` in the place of all three.

    Raises:
        CheckpointError: a parameter is no number.
    """
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    stated = {
        name: metadata[f"{scaling}.{name}"]
        for name in (*names, *_ATTENTION_FACTORS)
        if f"{scaling}.{name}" in metadata
    }
    for name, value in stated.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"the GGUF file's '{scaling}.{name}' is {value!r}, no number")
    yarn: dict[str, Any] = {key: stated[name] for name, key in names.items() if name in stated}
    factors = [stated[name] for name in _ATTENTION_FACTORS if name in stated]
    if factors:
        yarn["attention_factor"] = math.prod(factors) * (1 + 0.1 * math.log(max(factor, 1.0)))
    return yarn


def _same_in_all_layers(value: Any, key: str) -> Any:
    """Return the common value of a list by layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"the GGUF file gives its layers different values of '{key}'")
    return value[0]


def _check_heads(metadata: Mapping[str, Any], prefix: str) -> None:
    keys, values = (metadata.get(f"{prefix}.attention.{kind}_length") for kind in ("key", "value"))
    if keys != values:
        raise UnsupportedModelError(f"the GGUF file has heads of {keys} for keys and {values} for values")
