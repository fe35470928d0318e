"""Read single values of config.json, within the ranges of real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ...errors import CheckpointError

RawConfig = Mapping[str, Any]

# In the order of preference; the later ones are those of GPT-2, MPT, BLOOM and CodeGen.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
    "max_target_positions",
)
MAX_LAYERS = 4096
MAX_POSITIONS = 2**24  # above the longest contexts published, 10 million
_HEADS = (1, 2**14)
# Larger than any trained model: a damaged or hostile file must not cause huge allocations.
_RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MAX_LAYERS)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), _HEADS),
    **dict.fromkeys(("num_global_key_value_heads", "global_head_dim"), _HEADS),
    "hidden_size_per_layer_input": (0, 2**20),
    "vocab_size_per_layer_input": (1, 2**27),
    **dict.fromkeys(("hidden_size", "n_embd"), (1, 2**20)),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), (1, 2**22)),
    **dict.fromkeys(LENGTH_KEYS, (1, MAX_POSITIONS)),
    "original_max_position_embeddings": (1, MAX_POSITIONS),
    "vocab_size": (1, 2**27),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), (1, 2**20)),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), _HEADS),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step"), _HEADS),
}
_ANY_COUNT = (0, 2**31 - 1)
_LARGEST_NUMBER = 1e30
_SHOWN = 40  # characters of a value in a message


def with_defaults(raw: RawConfig, defaults: RawConfig | None = None) -> RawConfig:
    """Return ``defaults`` overridden by the non-null values of ``raw``."""
    return {**(defaults or {}), **{key: value for key, value in raw.items() if value is not None}}


def mapping(raw: RawConfig, *keys: str) -> RawConfig:
    """Return the object under the first of ``keys`` that is not empty, else an empty one.

    Raises:
        CheckpointError: the value is not an object.
    """
    for key in keys:
        if raw.get(key):
            if not isinstance(raw[key], dict):
                raise CheckpointError(f"config.json: '{key}' must be an object, found {raw[key]!r}")
            return cast(RawConfig, raw[key])
    return {}


def module_name(model_type: object) -> str:
    """Return the name of the module of a family: that of the model type, without hyphens."""
    return str(model_type).replace("-", "_")


def decoder_values(raw: RawConfig) -> RawConfig:
    """Return what config.json says of the decoder: of a model of several parts one of them, else all.

    Raises:
        CheckpointError: that part is not an object.
    """
    return mapping(raw, "text_config", "decoder") or raw


def text_config(raw: RawConfig, family: str) -> RawConfig:
    """Return the decoder's part of a multimodal config.json, of ``family`` where it names none.

    Whether the head is tied may be stated outside of that part, which then counts.

    Raises:
        CheckpointError: there is none.
    """
    text, tied = raw.get("text_config"), raw.get("tie_word_embeddings")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"config.json of model_type '{raw['model_type']}' must hold an object 'text_config'"
        )
    return {"model_type": family, **text, **({} if tied is None else {"tie_word_embeddings": tied})}


def integer(raw: RawConfig, key: str, default: int | None = None) -> int:
    """Return the integer under ``key``.

    Raises:
        CheckpointError: the value is not an integer, or out of the range of that key.
    """
    value = raw.get(key, default)
    low, high = _RANGES.get(key, _ANY_COUNT)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(
            f"config.json: '{key}' must be an integer in [{low}, {high}], found {_shown(value)}"
        )
    return value


def number(raw: RawConfig, key: str, default: float | None = None) -> float:
    """Return the finite number under ``key``.

    Raises:
        CheckpointError: the value is not a finite number.
    """
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_NUMBER:
        raise CheckpointError(f"config.json: '{key}' must be a finite number, found {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
