"""Read and normalise a checkpoint's config.json into ``DecoderConfig``.

transformers 4 wrote ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters`` (for some
families one dictionary per layer type). Keys at their default may be missing. The exporter reads one form
only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ..storage.texts import read_text
from . import genai_config

RawConfig = Mapping[str, Any]

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
# In the order of preference; the later ones are those of GPT-2, MPT, BLOOM and CodeGen.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary position embedding. Which fields are used depends on ``rope_type``; see ``rope.py``.

    ``interleaved`` rotates pairs of adjacent elements instead of elements of both halves. ``proportional``
    turns only the first ``turning_dim`` of ``rotary_dim`` elements: the frequencies of the others are 0.
    """

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
    interleaved: bool = False
    turning_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A sparse mixture of experts.

    Args:
        scope: the layer's name in the checkpoint.
        count: number of experts.
        per_token: number of experts that each token is routed to (top-k).
        width: intermediate size of an expert.
        normalize: whether the routing weights of a token are scaled to sum to 1.
        names: names of an expert's gate, up and down projections in the checkpoint.
        shared: intermediate size of the shared expert, which every token uses and a sigmoid gate scales; 0
            for none.
        groups: number of groups of experts; a token's experts are those of its best groups.
        groups_per_token: number of groups that each token's experts come from.
        scale: factor of the routing weights.
        alpha: factor inside the sigmoid of an expert's SiLU.
        limit: bound of an expert's gate and up projections.
    """

    scope: str
    count: int
    per_token: int
    width: int
    normalize: bool
    names: tuple[str, str, str]
    shared: int = 0
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    alpha: float = 1.0
    limit: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Args:
        query_rank: width of the compressed queries; None if they are not compressed.
        key_value_rank: width of the compressed keys and values.
        rotary: elements of a key head with a rotary embedding, which all heads share.
        plain: elements of a key head without one.
        value: elements of a value head.
    """

    query_rank: int | None
    key_value_rank: int
    rotary: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueConfig:
    """The keys and values of a layer.

    Args:
        heads: number of heads of keys and of values.
        size: elements of a head, of queries too.
        owner: the layer that computes and caches them: the layer itself or an earlier one.
        one_projection: whether one projection gives both keys and values.
    """

    heads: int
    size: int
    owner: int
    one_projection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputConfig:
    """Embeddings of each layer beside those of the decoder (per-layer embeddings of Gemma).

    Args:
        vocab_size: rows of their table.
        width: elements for each layer.
    """

    vocab_size: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder, in one form for all families.

    Args:
        windows: per layer, the size of its sliding attention window; None for full attention.
        ropes: per layer, its rotary embedding; None for none.
        experts: per layer, its mixture of experts; None for one feed-forward layer.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of the output of attention and of the feed-forward layer.
        logits_scale: factor of the logits.
        parallel_residual: whether attention and the feed-forward layer read the same residual sum.
        alibi_slopes: per query head, the factor of a key's position that is added to its score (ALiBi,
            https://arxiv.org/abs/2108.12409); empty for none.
        embedding_width: width of the embedding if it is projected to the hidden size; None if it is not.
        latent: latent attention; None for attention without compression.
        unused_layers: number of layers behind the decoder's in the checkpoint, for speculation.
        norm_first: whether norms are in front of attention and of the feed-forward layer, not behind them.
        key_values: per layer, its keys and values; empty if every layer has its own, of equal sizes. Layers
            that read the cache of another follow all that have one.
        mlp_widths: per layer, its intermediate size; empty if it is ``intermediate_size`` in all.
        layer_input: embeddings of each layer; None for none.
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
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    parallel_residual: bool = False
    alibi_slopes: tuple[float, ...] = ()
    embedding_width: int | None = None
    norm_first: bool = True
    latent: LatentConfig | None = None
    unused_layers: int = 0
    key_values: tuple[KeyValueConfig, ...] = ()
    mlp_widths: tuple[int, ...] = ()
    layer_input: LayerInputConfig | None = None

    def key_value(self, layer: int) -> KeyValueConfig:
        """Return the keys and values of ``layer``."""
        if self.key_values:
            return self.key_values[layer]
        return KeyValueConfig(heads=self.num_kv_heads, size=self.head_dim, owner=layer)

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of ``layer``'s feed-forward layer."""
        return self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size

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
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise CheckpointError(f"cannot read {path}: it is not a regular file")
    try:
        content = json.loads(read_text(path, CheckpointError))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config.json; without one, the same facts from genai_config.json.

    Raises:
        ModelNotFoundError: the folder or its config.json does not exist.
        CheckpointError: the file is not a JSON object, or has no ``model_type``.
    """
    path, genai = folder / CONFIG_FILE, folder / genai_config.GENAI_FILE
    if not path.is_file() and genai.is_file():
        return genai_config.checkpoint_config(read_json(genai), genai)
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} is not a Hugging Face checkpoint: it holds no config.json")
    raw = read_json(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} has no 'model_type'")
    return raw


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; without one, the same facts from genai_config.json; else {}.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path, genai = folder / GENERATION_FILE, folder / genai_config.GENAI_FILE
    if not path.is_file() and genai.is_file():
        return genai_config.generation_config(read_json(genai), genai)
    return read_json(path) if path.is_file() else {}


def decoder_config(
    raw: RawConfig,
    *,
    defaults: RawConfig | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    experts: Sequence[ExpertsConfig | None] | None = None,
) -> DecoderConfig:
    """Convert config.json into a ``DecoderConfig``.

    Args:
        raw: the content of config.json.
        defaults: the family's values of keys that are missing or null.
        windows: per layer, its sliding window; by default none.
        ropes: per layer, its rotary embedding; by default the one that ``raw`` describes.
        experts: per layer, its mixture of experts; by default none.

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


def rope_config(
    raw: RawConfig, parameters: RawConfig | None = None, *, interleaved: bool = False
) -> RopeConfig:
    """Read a rotary embedding from ``parameters``, by default from the whole model's in ``raw``."""
    if parameters is None:
        parameters = mapping(raw, "rope_parameters", "rope_scaling")
    parameters = with_defaults(parameters)
    max_positions = integer(raw, "max_position_embeddings")
    head_dim = integer(raw, "head_dim", integer(raw, "hidden_size") // integer(raw, "num_attention_heads"))
    partial = number(parameters, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    turning = int(head_dim * partial)
    return RopeConfig(
        rope_type=rope_type,
        theta=number(parameters, "rope_theta", number(raw, "rope_theta", 10_000.0)),
        rotary_dim=head_dim if rope_type == "proportional" else turning,
        turning_dim=turning,
        max_position_embeddings=max_positions,
        # The top-level key takes precedence over the one in the rope's parameters.
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
        interleaved=interleaved,
    )


def layer_windows(layer_types: Sequence[str], window: int | None) -> list[int | None]:
    """Return ``window`` for each sliding layer and None for each full layer.

    Raises:
        UnsupportedModelError: a type is neither ``full_attention`` nor ``sliding_attention``.
    """
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedModelError(
            f"layer type '{names}' is not supported; supported: full_attention, sliding_attention"
        )
    return [window if kind == "sliding_attention" else None for kind in layer_types]


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


def states_length(raw: RawConfig) -> bool:
    """Whether config.json states the context length."""
    text = mapping(raw, "text_config") or raw
    return any(text.get(key) is not None for key in LENGTH_KEYS)


def context_lengths(raw: RawConfig) -> tuple[int, int]:
    """Return the maximum context length and the default context length, in tokens.

    They differ for rotary embeddings that depend on the length (``longrope``, ``dynamic``): a longer context
    costs precision there, so the default is the original context.

    Raises:
        CheckpointError: a length is missing or out of range.
    """
    text = with_defaults(mapping(raw, "text_config") or raw)
    key = next((key for key in LENGTH_KEYS if text.get(key) is not None), LENGTH_KEYS[0])
    longest = integer(text, key)
    rope = mapping(text, "rope_parameters", "rope_scaling")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    original = integer(
        text,
        "original_max_position_embeddings",
        integer(with_defaults(rope), "original_max_position_embeddings", longest),
    )
    factor = number(with_defaults(rope), "factor", 1.0) or 1.0
    if rope_type == "yarn":
        longest = default = max(longest, int(original * factor))
    elif rope_type == "dynamic":
        longest, default = int(longest * factor), longest
    else:
        default = original if rope_type in ("longrope", "su") else longest
    if not 1 <= default <= longest <= MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: a context of {longest} tokens is out of range [1, {MAX_POSITIONS}]"
        )
    return longest, default
