"""Validate a decoder's configuration before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import CheckpointError, UnsupportedModelError
from .config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    DecoderConfig,
    ExpertsConfig,
    MambaConfig,
    RawConfig,
    RopeConfig,
    StateConfig,
)
from .weights import Checkpoint

_LONGEST_ROPE_FACTOR = 1e6
# Families whose rotary embeddings may turn a part of a head. In transformers, others ignore the factor for
# the type "default" and fail for other types, so that a file with one has no right result.
_PARTIAL_ROPES = frozenset(
    {
        *(
            "glm4",
            "glm4_moe",
            "glm_ocr",
            "glm_ocr_text",
            "gpt_neox",
            "mellum",
            "phi",
            "phi3",
            "qwen3_next",
            "stablelm",
        ),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    }
)
# Fields that transformers takes for another field, by family; a file may state both.
_SAME_FIELDS: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "lfm3": {"rms_norm_eps": "norm_eps"},
    # Of these, the size of the part of a head that turns.
    "deepseek_v3": {"head_dim": "qk_rope_head_dim"},
    "youtu": {"head_dim": "qk_rope_head_dim"},
}


def check_options(raw: RawConfig) -> None:
    """Refuse fields of config.json, or of its decoder's part, that have an effect and that no family reads.

    Raises:
        UnsupportedModelError: one has an effect; the message names it.
    """
    text = raw.get("text_config")
    for part in (raw, text) if isinstance(text, dict) else (raw,):
        if part.get("is_causal") is False:
            raise UnsupportedModelError("config.json: 'is_causal' false is an encoder's, not a decoder's")
        if part.get("use_bidirectional_attention") in (True, "all"):
            raise UnsupportedModelError(
                "config.json: a model with 'use_bidirectional_attention' is an encoder, not a decoder"
            )
        model_type = str(part.get("model_type", raw["model_type"]))
        _check_partial_ropes(part, model_type)
        _check_same_fields(part, model_type)


def _check_same_fields(raw: RawConfig, model_type: str) -> None:
    """Refuse a second name of a field with a value of its own, which transformers would take."""
    for name, read in _SAME_FIELDS.get(model_type, {}).items():
        if raw.get(name) is not None and raw.get(name) != raw.get(read):
            raise UnsupportedModelError(
                f"config.json: '{name}' {raw[name]!r} is another name of '{read}', which is "
                f"{raw.get(read)!r}, for model_type '{model_type}'; state '{read}' alone"
            )


def _check_partial_ropes(raw: RawConfig, model_type: str) -> None:
    if model_type in _PARTIAL_ROPES:
        return
    ropes = [rope for key in ("rope_parameters", "rope_scaling") for rope in _ropes(raw.get(key))]
    for rope in (raw, *ropes):
        factor = rope.get("partial_rotary_factor")
        if factor not in (None, 1) and rope.get("rope_type", rope.get("type")) != "proportional":
            raise UnsupportedModelError(
                f"config.json: 'partial_rotary_factor' {factor!r} is not supported for model_type "
                f"'{model_type}'"
            )


def _ropes(value: object) -> list[RawConfig]:
    """Return the parameters of one rotary embedding, or of one for each kind of layer."""
    if not isinstance(value, dict):
        return []
    return [value, *(part for part in value.values() if isinstance(part, dict))]


def check_config(config: DecoderConfig) -> None:
    """Check that sizes and numbers are in the range of real decoders.

    Raises:
        CheckpointError: one is out of range; the message names it and its value.
    """
    _number("num_hidden_layers", config.num_layers, 1, MAX_LAYERS)
    _number("rms_norm_eps", config.norm_eps, 0, 1)
    _number("attention scale", config.attention_scale, 0, 1e6)
    for name, cap in (("attn", config.attention_softcap), ("final", config.final_softcap)):
        if cap is not None:
            _number(f"{name}_logit_softcapping", cap, 1e-3, 1e9)
    _check_key_values(config)
    for state in set(config.states) - {None}:
        _check_state(state)
    if not isinstance(config.hidden_act, str):
        raise CheckpointError(f"config.json: 'hidden_act' must be a name, found {config.hidden_act!r}")
    _check_layers(config)


def _check_layers(config: DecoderConfig) -> None:
    facts: dict[str, Sequence[object]] = {
        "attention windows": config.windows,
        "rotary embeddings": config.ropes,
        "feed-forward layers": config.experts,
    }
    if config.key_values:
        facts["keys and values"] = config.key_values
    if config.states:
        facts["kinds of layers"] = config.states
    if config.attends:
        facts["layers that attend or not"] = config.attends
    if config.mlp_widths:
        facts["widths of feed-forward layers"] = config.mlp_widths
    for name, values in facts.items():
        if len(values) != config.num_layers:
            raise CheckpointError(
                f"config.json describes {len(values)} {name} for {config.num_layers} layers"
            )
    for window in config.windows:
        if window is not None:
            _number("sliding_window", window, 1, 2**31 - 1, whole=True)
    sized = {(id(rope), config.key_value(layer).size): rope for layer, rope in enumerate(config.ropes)}
    for (_, size), rope in sized.items():  # most layers share one
        if rope is not None:
            _check_rope(rope, size)
    for experts in {id(experts): experts for experts in config.experts}.values():
        if experts is not None:
            _check_experts(experts)


def _check_key_values(config: DecoderConfig) -> None:
    pairs = [config.key_value(layer) for layer in range(config.num_layers)]
    for heads in {pair.heads for pair in pairs}:
        if config.num_heads % heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {config.num_heads} must be a multiple of "
                f"num_key_value_heads {heads}"
            )
    owners = {pair.owner for pair in pairs}
    if owners != set(range(len(owners))):
        raise CheckpointError("config.json: layers with keys and values of their own must come first")
    for layer, pair in enumerate(pairs):
        owner = pairs[pair.owner]
        if (owner.heads, owner.size) != (pair.heads, pair.size):
            raise CheckpointError(
                f"config.json: layer {layer} has {pair.heads} KV heads of {pair.size}, and layer "
                f"{pair.owner}, whose keys and values it reads, has {owner.heads} of {owner.size}"
            )


def _check_state(state: StateConfig | None) -> None:
    if state is None:
        return
    _number("channels of the short convolution", state.channels, 1, 2**24, whole=True)
    _number("taps of the short convolution", state.taps, 2, 1024, whole=True)
    if state.heads:
        for name in ("heads", "key_heads", "key_size", "value_size"):
            _number(f"{name} of linear attention", getattr(state, name), 1, 2**16, whole=True)
        if state.heads % state.key_heads:
            raise CheckpointError(
                f"config.json: {state.heads} heads of values of linear attention must be a multiple of its "
                f"{state.key_heads} heads of keys"
            )
    if isinstance(state, MambaConfig):
        for factor in (state.input_scale, *state.scales, state.output_scale):
            _number("factor of a Mamba layer", factor, -1e6, 1e6)
        if not 0 <= state.slowest <= state.fastest:
            raise CheckpointError(
                f"config.json: 'time_step_limit' must be two rising numbers of at least 0, found "
                f"[{state.slowest!r}, {state.fastest!r}]"
            )


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if not isinstance(rope.rope_type, str):
        raise CheckpointError(f"config.json: 'rope_type' must be a name, found {rope.rope_type!r}")
    smallest = 4 if rope.rope_type == "dynamic" else 2  # its formula divides by rotary_dim - 2
    if rope.rotary_dim % 2 or not smallest <= rope.rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: a rotary embedding has {rope.rotary_dim} of {head_dim} dimensions; it must be an "
            f"even number in [{smallest}, {head_dim}]"
        )
    _number("rope_theta", rope.theta, 1, 1e15)
    if rope.rope_type == "yarn" and rope.theta == 1:
        raise CheckpointError(
            "config.json: 'rope_theta' must exceed 1 with YaRN, which divides by its logarithm"
        )
    _number(
        "original_max_position_embeddings",
        rope.original_max_position_embeddings,
        2,
        MAX_POSITIONS,
        whole=True,
    )
    if rope.factor is not None:
        _number("factor", rope.factor, 1e-6, _LONGEST_ROPE_FACTOR)
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = getattr(rope, name)
        if value is not None:
            _number(name, value, 0, 1e6)
    for name in ("beta_fast", "beta_slow"):
        _number(name, getattr(rope, name), 1e-6, 1e6)
    _number("low_freq_factor", rope.low_freq_factor, 0, 1e6)
    if not rope.low_freq_factor < rope.high_freq_factor <= 1e6:
        raise CheckpointError(
            f"config.json: 'high_freq_factor' {rope.high_freq_factor!r} must exceed 'low_freq_factor' "
            f"{rope.low_freq_factor!r}"
        )
    for name in ("short_factor", "long_factor"):
        for value in getattr(rope, name):
            _number(name, value, 1e-6, _LONGEST_ROPE_FACTOR)


def _check_experts(experts: ExpertsConfig) -> None:
    _number("number of experts", experts.count, 1, 2**14, whole=True)
    _number("num_experts_per_tok", experts.per_token, 1, experts.count, whole=True)
    _number("expert's intermediate size", experts.width, 1, 2**22, whole=True)
    _number("number of groups of experts", experts.groups, 1, experts.count, whole=True)
    _number("topk_group", experts.groups_per_token, 1, experts.groups, whole=True)
    if experts.count % experts.groups:
        raise CheckpointError(
            f"config.json: {experts.count} experts cannot be divided into {experts.groups} groups"
        )
    selectable = experts.count // experts.groups * experts.groups_per_token
    if experts.per_token > selectable:
        raise CheckpointError(
            f"config.json: a token is routed to {experts.per_token} experts, and its groups have {selectable}"
        )


def check_layer_count(config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Check that the configuration has as many layers as the checkpoint.

    Raises:
        CheckpointError: the counts differ.
    """
    counts = checkpoint.layer_counts()
    if config.num_layers in counts.values():
        return
    if config.unused_layers and config.num_layers + config.unused_layers in counts.values():
        return
    held = ", ".join(f"{count} of '{prefix}.N'" for prefix, count in sorted(counts.items())) or "none"
    raise CheckpointError(
        f"config.json says {config.num_layers} layers (num_hidden_layers); {checkpoint.source} holds {held}"
    )


def _number(name: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    if (
        not isinstance(value, kinds)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise CheckpointError(
            f"config.json: '{name}' must be a number in [{low:g}, {high:g}], found {value!r}"
        )
