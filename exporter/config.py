"""A checkpoint's config.json, normalised once.

transformers 4 wrote ``rope_theta`` and ``rope_scaling``, transformers 5 writes ``rope_parameters`` (for some
families one dictionary per layer type); keys at their default may be missing. All that follows sees one form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

RawConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary position embedding. Which fields count depends on ``rope_type``; see ``rope.py``."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A sparse mixture of experts.

    Args:
        scope: the layer's name in the checkpoint.
        count: how many experts there are.
        per_token: how many of them each token asks.
        width: an expert's intermediate size.
        normalize: the weights of a token's experts are scaled to sum to 1.
        names: an expert's gate, up and down projections in the checkpoint.
        shared: intermediate size of the expert that all tokens ask, weighed by a gate of its own; 0 for none.
    """

    scope: str
    count: int
    per_token: int
    width: int
    normalize: bool
    names: tuple[str, str, str]
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What every decoder family shares.

    Args:
        windows: per layer, how many latest positions it attends to; None for all.
        ropes: per layer, its rotary embedding; None for none.
        experts: per layer, its mixture of experts; None for one feed-forward layer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    experts: tuple[ExpertsConfig | None, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config.json.

    Raises:
        ModelNotFoundError: the folder or its config.json does not exist.
        CheckpointError: it names no ``model_type``.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} is no Hugging Face checkpoint: it holds no config.json")
    raw = read_json(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type")
    return raw


def decoder_config(
    raw: RawConfig,
    *,
    defaults: RawConfig | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    experts: Sequence[ExpertsConfig | None] | None = None,
) -> DecoderConfig:
    """Normalise ``raw``.

    ``defaults`` is what the family assumes for keys that are missing or null. By default no layer has
    a window, and all have the rope that ``raw`` describes.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
    """
    raw = with_defaults(raw, defaults)
    num_layers, num_heads = integer(raw, "num_hidden_layers"), integer(raw, "num_attention_heads")
    head_dim = integer(raw, "head_dim", integer(raw, "hidden_size") // num_heads)
    return DecoderConfig(
        model_type=raw["model_type"],
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=integer(raw, "max_position_embeddings"),
        hidden_act=raw.get("hidden_act", "silu"),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        attention_scale=number(raw, "query_pre_attn_scalar", head_dim) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        windows=tuple(windows if windows is not None else [None] * num_layers),
        ropes=tuple(ropes if ropes is not None else [rope_config(raw)] * num_layers),
        experts=tuple(experts if experts is not None else [None] * num_layers),
    )


def rope_config(raw: RawConfig, parameters: RawConfig | None = None) -> RopeConfig:
    """The rotary embedding that ``parameters`` (by default the one of the whole model) describes."""
    if parameters is None:
        parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    parameters = with_defaults(parameters)
    max_positions = integer(raw, "max_position_embeddings")
    head_dim = integer(raw, "head_dim", integer(raw, "hidden_size") // integer(raw, "num_attention_heads"))
    partial = number(parameters, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return RopeConfig(
        rope_type=parameters.get("rope_type", parameters.get("type", "default")),
        theta=number(parameters, "rope_theta", number(raw, "rope_theta", 10_000.0)),
        rotary_dim=int(head_dim * partial),
        max_position_embeddings=max_positions,
        # Beside the rope's own parameters, this key wins over the one among them.
        original_max_position_embeddings=integer(
            raw,
            "original_max_position_embeddings",
            integer(parameters, "original_max_position_embeddings", max_positions),
        ),
        factor=parameters.get("factor"),
        attention_factor=parameters.get("attention_factor"),
        **{key: number(parameters, key) for key in optional if key in parameters},
        truncate=bool(parameters.get("truncate", True)),
        short_factor=tuple(parameters.get("short_factor", ())),
        long_factor=tuple(parameters.get("long_factor", ())),
    )


def layer_windows(layer_types: Sequence[str], window: int | None) -> list[int | None]:
    """Per layer, ``window`` where its type says so.

    Raises:
        UnsupportedModelError: a type is neither ``full_attention`` nor ``sliding_attention``.
    """
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedModelError(f"layer type '{names}' is not supported, only full and sliding attention")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def with_defaults(raw: RawConfig, defaults: RawConfig | None = None) -> RawConfig:
    """``raw`` without its nulls, over ``defaults``."""
    return {**(defaults or {}), **{key: value for key, value in raw.items() if value is not None}}


def integer(raw: RawConfig, key: str, default: int | None = None) -> int:
    """The integer under ``key``."""
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json: '{key}' must be an integer, found {value!r}")
    return value


def number(raw: RawConfig, key: str, default: float | None = None) -> float:
    """The number under ``key``."""
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: '{key}' must be a number, found {value!r}")
    return float(value)


def context_lengths(raw: RawConfig) -> tuple[int, int]:
    """The most tokens a sequence may have, and the default where a longer context costs precision.

    Ropes that change with the length (``longrope``, ``dynamic``) have the original context as their default.
    """
    text = with_defaults(raw.get("text_config", raw))
    longest = integer(text, "max_position_embeddings", text.get("n_positions"))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    original = text.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings", longest)
    )
    factor = rope.get("factor") or 1.0
    if rope_type == "yarn":
        return max(longest, int(original * factor)), max(longest, int(original * factor))
    if rope_type == "dynamic":
        return int(longest * factor), longest
    return longest, original if rope_type in ("longrope", "su") else longest
