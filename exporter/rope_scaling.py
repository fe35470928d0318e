"""A context extension that the user chooses at load: a rope scaling in place of the one in config.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..errors import UnsupportedModelError, UsageError
from .config import LENGTH_KEYS, MAX_POSITIONS, RawConfig, RopeConfig, decoder_values, mapping

_TYPES = ("yarn", "linear", "dynamic")
_MOST = 1024.0  # above every factor published
_UNSCALED = ("default", "dynamic")  # their weights were trained with plain frequencies


def parse_rope_scaling(text: str) -> tuple[str, float]:
    """Return type and factor of a rope scaling: those of ``yarn:4`` are ``yarn`` and 4.

    Raises:
        UsageError: the type is unknown, or the factor is no number in [1, 1024].
    """
    kind, _, factor = text.partition(":")
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if kind not in _TYPES or not 1 <= value <= _MOST:
        raise UsageError(
            f"rope_scaling must be TYPE:FACTOR, such as yarn:4, with one of the types {', '.join(_TYPES)} "
            f"and a factor from 1 to {_MOST:.0f}, not {text!r}"
        )
    return kind, value


def scaled_config(raw: RawConfig, scaling: str) -> dict[str, Any]:
    """Return config.json with another rope scaling, written as transformers reads it.

    The longest context becomes ``factor`` times the original one. That is the context that ``raw`` states, or
    the original of a rope that this type scales already, whose other parameters stay. Where kinds of layers
    have ropes of their own, the layers without a window are scaled.

    Args:
        raw: the content of config.json.
        scaling: see ``parse_rope_scaling``.

    Raises:
        UsageError: ``scaling`` is invalid, or the context would be too long.
        UnsupportedModelError: the model has no rope, or one that this scaling cannot replace.
        CheckpointError: ``raw`` is invalid.
    """
    kind, factor = parse_rope_scaling(scaling)
    own = _extended_rope(raw)
    if own is None:
        raise UnsupportedModelError(
            f"rope_scaling has no effect: this {raw['model_type']} has no rotary embedding; omit it"
        )
    if own.rope_type not in (*_UNSCALED, kind):
        raise UnsupportedModelError(
            f"rope_scaling {scaling} cannot replace the rope type '{own.rope_type}' of this "
            f"{raw['model_type']}, with which its weights were trained; omit it"
        )
    original = _original_context(own, kind)
    longest = int(original * factor)
    if longest > MAX_POSITIONS:
        raise UsageError(
            f"rope_scaling {scaling} makes a context of {longest} tokens of {original}, and {MAX_POSITIONS} "
            "is the most; choose a smaller factor"
        )
    text = dict(decoder_values(raw))
    text.pop("original_max_position_embeddings", None)  # it would take precedence over the rope's own
    if kind != "dynamic":  # whose frequencies follow from the original context under this key
        text[next((key for key in LENGTH_KEYS if text.get(key) is not None), LENGTH_KEYS[0])] = longest
    key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    ropes = dict(mapping(text, key))
    if isinstance(full := ropes.get("full_attention"), dict):
        text[key] = {**ropes, "full_attention": _parameters(full, own, kind, factor, original)}
    else:
        text[key] = _parameters(ropes, own, kind, factor, original)
    part = next((name for name in ("text_config", "decoder") if raw.get(name)), None)
    scaled = text if part is None else {**raw, part: text}
    if not _differs_in_scaling(own, _extended_rope(scaled), kind, factor):
        raise UnsupportedModelError(
            f"rope_scaling {scaling} is not supported by model_type '{raw['model_type']}'"
        )
    return scaled


def _extended_rope(raw: RawConfig) -> RopeConfig | None:
    """Return the rope of the first layer without a window that has one, else of any layer; None without."""
    from .family import normalised_config  # imports the library of graphs

    config = normalised_config(raw)
    layers = [
        (rope, window) for rope, window in zip(config.ropes, config.windows, strict=True) if rope is not None
    ]
    return next((rope for rope, window in layers if window is None), layers[0][0] if layers else None)


def _original_context(own: RopeConfig, kind: str) -> int:
    """Return the tokens that a factor of 1 reaches."""
    if own.rope_type != kind or kind == "dynamic":
        return own.max_position_embeddings
    # A linear rope states no original context, only the one that its own factor reaches.
    reached = own.max_position_embeddings / (own.factor or 1.0)
    return own.original_max_position_embeddings if kind == "yarn" else max(1, round(reached))


def _parameters(own: RawConfig, rope: RopeConfig, kind: str, factor: float, original: int) -> dict[str, Any]:
    """Return the parameters ``own`` of a rope with another scaling."""
    kept = {
        name: value for name, value in own.items() if name not in ("type", "original_max_position_embeddings")
    }
    if rope.rope_type != kind:
        kept.pop("attention_factor", None)
    elif kept.get("attention_factor") is not None:
        # It stands for 1 + 0.1 ln(factor) and further factors, which stay.
        kept["attention_factor"] *= _magnitude(factor) / _magnitude(rope.factor or 1.0)
    stated = {"original_max_position_embeddings": original} if kind == "yarn" else {}
    return {**kept, "rope_type": kind, "factor": factor, **stated}


def _magnitude(factor: float) -> float:
    return 1.0 + 0.1 * math.log(max(factor, 1.0))


def _differs_in_scaling(own: RopeConfig, scaled: RopeConfig | None, kind: str, factor: float) -> bool:
    """Return whether the family has read the scaling, and nothing else differs."""
    if scaled is None or (scaled.rope_type, scaled.factor) != (kind, factor):
        return False
    names = (
        "rope_type",
        "factor",
        "attention_factor",
        "max_position_embeddings",
        "original_max_position_embeddings",
    )
    return dataclasses.replace(scaled, **{name: getattr(own, name) for name in names}) == own
