"""The config.json that corresponds to the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .architecture import Tensors, architecture, has, tensor_name
from .keys import check_keys

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
_ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")
_OTHER_WINDOWS = ("gemma3",)  # whose layers with windows have a rope of their own
_SCALED_WINDOWS = ("gemma2", "gpt-oss")  # whose layers with windows take the factor of the rope as it is


def config_of(
    metadata: Mapping[str, Any],
    tensors: Tensors,
    factors: Mapping[str, list[float]] | None = None,
    constants: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the config.json that corresponds to a file's metadata.

    Args:
        metadata: metadata of the GGUF file.
        tensors: of the file, under Hugging Face's names.
        factors: of the rope by frequency, as longrope names them.
        constants: fields that the file holds as tensors.

    Raises:
        CheckpointError: a key has the wrong type, or the embedding is missing.
        UnsupportedModelError: the architecture, its rope, or a key is not supported.
    """
    known, prefix = architecture(metadata), metadata["general.architecture"]
    keys = {**_KEYS, **known.keys}
    fields = {
        key: metadata[f"{prefix}.{name}"] for name, key in keys.items() if f"{prefix}.{name}" in metadata
    }
    if fields.get("sliding_window") == 0:  # of models without one
        del fields["sliding_window"]
    if fields.get("routed_scaling_factor") == 0:  # of experts whose sum is not scaled
        fields["routed_scaling_factor"] = 1.0
    embedding = tensors.get(tensor_name("token_embd.weight", known))
    if embedding is None:
        raise CheckpointError("the GGUF file has no tensor 'token_embd.weight'")
    config = {
        "model_type": known.model_type,
        **_unstated(metadata, prefix),
        **fields,
        **(constants or {}),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": tensor_name("output.weight", known) not in tensors,
        "attention_bias": has(tensors, "q_proj.bias"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **_rope(metadata, prefix, by_frequency=bool(factors)),
    }
    check_keys(metadata, prefix, frozenset(keys))
    if factors and not known.own_factors:
        config |= _by_frequency(metadata, prefix, config, factors)
    elif factors:
        config["rope_factors"] = factors
    config |= known.adapt(config, tensors)
    for key in ("num_key_value_heads", "intermediate_size"):
        config[key] = _same_in_all_layers(config.get(key), key)
    if not known.own_heads:
        _check_heads(metadata, prefix)
    return {key: value for key, value in config.items() if value is not None}


def _by_frequency(
    metadata: Mapping[str, Any], prefix: str, config: Mapping[str, Any], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return the keys of a rope whose factors by frequency are tensors."""
    scaling = f"{prefix}.rope.scaling"
    original = metadata.get(f"{scaling}.original_context_length", config.get("max_position_embeddings"))
    attention = metadata.get(f"{scaling}.attn_factor", 1.0)
    linear = config.get("rope_scaling", {}).get("factor", 1.0)
    scaled = {name: [factor * linear for factor in values] for name, values in factors.items()}
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {"rope_type": "longrope", "attention_factor": attention, **scaled},
    }


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
