"""Normalise the content of config.json into ``DecoderConfig``.

transformers 4 wrote ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters`` (for some
families one dictionary per layer type). Keys at their default may be missing. The exporter reads one form
only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import UnsupportedModelError
from .types import DecoderConfig, ExpertsConfig, RopeConfig, StateConfig
from .values import RawConfig, integer, mapping, number, with_defaults

# Keys of attention's scores and of the logits that only some families have.
SCORES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def decoder_config(
    raw: RawConfig,
    *,
    defaults: RawConfig | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    experts: Sequence[ExpertsConfig | None] | None = None,
    states: Sequence[StateConfig | None] = (),
    scores: Collection[str] = (),
) -> DecoderConfig:
    """Convert config.json into a ``DecoderConfig``.

    Args:
        raw: the content of config.json.
        defaults: the family's values of keys that are missing or null.
        windows: per layer, its sliding window; by default none.
        ropes: per layer, its rotary embedding; by default the one that ``raw`` describes.
        experts: per layer, its mixture of experts; by default none.
        states: per layer, its recurrent state, None for attention; by default every layer has attention.
        scores: the keys of ``SCORES`` that the family has; in files of others they have no effect.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
    """
    raw = {
        key: value
        for key, value in with_defaults(raw, defaults).items()
        if key not in SCORES or key in scores
    }
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
        attention_softcap=_cap(raw, "attn_logit_softcapping"),
        final_softcap=_cap(raw, "final_logit_softcapping"),
        windows=tuple(windows if windows is not None else [None] * num_layers),
        ropes=tuple(ropes if ropes is not None else [rope_config(raw)] * num_layers),
        experts=tuple(experts if experts is not None else [None] * num_layers),
        states=tuple(states),
    )


def _cap(raw: RawConfig, key: str) -> float | None:
    return None if raw.get(key) is None else number(raw, key)


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


def ropes_of_types(
    raw: RawConfig, layer_types: Sequence[str], *, without: Collection[str] = ()
) -> list[RopeConfig | None]:
    """Return the rotary embedding of each layer, of those that ``rope_parameters`` has by kind of layer.

    Layers of the kinds ``without`` have none.
    """
    by_type = {
        kind: None if kind in without else rope_config(raw, mapping(raw["rope_parameters"], kind))
        for kind in set(layer_types)
    }
    return [by_type[kind] for kind in layer_types]


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
