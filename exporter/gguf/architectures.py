"""Map GGUF's architectures to Hugging Face's configuration keys and tensor names.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .keys import check_keys

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
_ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")
_BARE = ("self_attn.sinks",)  # parameters whose names have no suffix
_GEMMA_27B_LAYERS = (46, 62)  # of Gemma 2 and 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The differences of one GGUF architecture from the common names.

    Args:
        model_type: the model family, a module of ``exporter/models``.
        inner: names of a layer's modules that differ from the common ones.
        rotates_pairs: whether rows of q and k are ordered for a rope that rotates adjacent elements.
        norm_offset: offset that the file's norm weights include.
        experts: whether its layers are mixtures of experts, whose weights are stacked.
        keys: further metadata, without the prefix, and the keys of config.json.
        adapt: returns keys of config.json that are computed from others.
    """

    model_type: str
    inner: Mapping[str, str] = field(default_factory=dict)
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


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of the experts, and that the bounds of yarn are not rounded."""
    found = {"intermediate_size": config.get("moe_intermediate_size", config.get("intermediate_size"))}
    scaling = config.get("rope_scaling")
    return found if scaling is None else {**found, "rope_scaling": {**scaling, "truncate": False}}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", rotates_pairs=True),
    "smollm3": Architecture(model_type="smollm3", rotates_pairs=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    # llama.cpp scales the weights of a token's experts to a sum of 1, as all published models do.
    "qwen3moe": Architecture(
        model_type="qwen3_moe", experts=True, adapt=lambda config: {"norm_topk_prob": True}
    ),
    "phi3": Architecture(model_type="phi3", inner={"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": Architecture(model_type="gpt_oss", inner=_GPT_OSS, experts=True, adapt=_gpt_oss),
    "gemma2": Architecture(model_type="gemma2", inner=_GEMMA, norm_offset=1.0, adapt=_gemma_scale),
    "gemma3": Architecture(
        model_type="gemma3_text",
        inner=_GEMMA,
        norm_offset=1.0,
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        adapt=_gemma_scale,
    ),
}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a file.

    Raises:
        CheckpointError: the metadata has no architecture.
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
    return ARCHITECTURES[name]


def tensor_name(name: str, known: Architecture) -> str:
    """Return Hugging Face's name of a tensor; unknown names are unchanged."""
    stem, dot, suffix = name.rpartition(".")
    found = _BLOCK.fullmatch(stem)
    if found is None:
        return f"{_OUTER[stem]}.{suffix}" if stem in _OUTER else name
    inner = {**_INNER, **known.inner}.get(found[2])
    if inner is None:
        return name
    return f"model.layers.{found[1]}.{inner}" + ("" if inner in _BARE else f"{dot}{suffix}")


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
        UnsupportedModelError: the architecture, or its rope, is not supported.
    """
    known, prefix = architecture(metadata), metadata["general.architecture"]
    keys = {**_KEYS, **known.keys}
    found = {
        key: metadata[f"{prefix}.{name}"] for name, key in keys.items() if f"{prefix}.{name}" in metadata
    }
    config = {
        "model_type": known.model_type,
        **found,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "attention_bias": biased,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **_rope(metadata, prefix, by_frequency=by_frequency),
    }
    for key in ("num_key_value_heads", "intermediate_size"):
        config[key] = _same_in_all_layers(config.get(key), key)
    _check_heads(metadata, prefix)
    check_keys(metadata, prefix, frozenset(keys))
    config |= known.adapt(config)
    return {key: value for key, value in config.items() if value is not None}


def _rope(metadata: Mapping[str, Any], prefix: str, *, by_frequency: bool) -> dict[str, Any]:
    """Return the keys of the rotary embedding without the factors by frequency, which are tensors."""
    factor = metadata.get(f"{prefix}.rope.scaling.factor", metadata.get(f"{prefix}.rope.scale_linear"))
    # Files that state only a factor mean a linear one, as llama.cpp reads them.
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none" if factor is None else "linear")
    result: dict[str, Any] = {}
    rotated, size = (
        metadata.get(f"{prefix}.rope.dimension_count"),
        metadata.get(f"{prefix}.attention.key_length"),
    )
    if size is None and isinstance(metadata.get(f"{prefix}.embedding_length"), int):
        size = metadata[f"{prefix}.embedding_length"] // max(
            1, metadata.get(f"{prefix}.attention.head_count", 1)
        )
    if rotated is not None and size and rotated != size:
        result["partial_rotary_factor"] = rotated / size
    if kind in ("linear", "yarn"):
        original = metadata.get(f"{prefix}.rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": 1.0 if factor is None else factor}
        result["rope_scaling"] = scaling | (
            {} if original is None else {"original_max_position_embeddings": original}
        )
    if kind == "yarn":
        result["rope_scaling"] |= _yarn(metadata, f"{prefix}.rope.scaling", factor or 1.0)
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
    found: dict[str, Any] = {key: stated[name] for name, key in names.items() if name in stated}
    factors = [stated[name] for name in _ATTENTION_FACTORS if name in stated]
    if factors:
        found["attention_factor"] = math.prod(factors) * (1 + 0.1 * math.log(max(factor, 1.0)))
    return found


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
