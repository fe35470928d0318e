"""The context length that config.json states."""

from __future__ import annotations

from ...errors import CheckpointError
from .values import (
    LENGTH_KEYS,
    MAX_POSITIONS,
    RawConfig,
    decoder_values,
    integer,
    mapping,
    number,
    with_defaults,
)

# Of families whose published or newly written files state none: the tokens of a sequence in their training.
TRAINED_LENGTHS = {"bloom": 2048, "falcon": 2048, "trocr": 512}


def states_length(raw: RawConfig) -> bool:
    """Whether config.json states the context length, or its family has one."""
    text = decoder_values(raw)
    return text.get("model_type") in TRAINED_LENGTHS or any(text.get(key) is not None for key in LENGTH_KEYS)


def context_lengths(raw: RawConfig) -> tuple[int, int]:
    """Return the maximum context length and the default context length, in tokens.

    They differ for rotary embeddings that depend on the length (``longrope``, ``dynamic``): a longer context
    costs precision there, so the default is the original context.

    Raises:
        CheckpointError: a length is missing or out of range.
    """
    text = with_defaults(decoder_values(raw))
    key = next((key for key in LENGTH_KEYS if text.get(key) is not None), LENGTH_KEYS[0])
    longest = integer(text, key, TRAINED_LENGTHS.get(str(text.get("model_type"))))
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
