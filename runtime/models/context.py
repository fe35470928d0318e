"""The context length of a model: from its configuration, its graph's metadata, or its position tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...contract import CONTEXT_LENGTH
from ...errors import CheckpointError
from ...exporter.config import CONFIG_FILE, context_lengths, read_config, read_json, states_length
from ...exporter.config.genai import GENAI_FILE
from ...exporter.facts import GraphFacts


class ContextLengths(NamedTuple):
    """Tokens of a sequence.

    Args:
        longest: the maximum.
        default: the maximum unless the user asks for more.
    """

    longest: int
    default: int


def optional_config(folder: Path) -> dict[str, Any]:
    """Return config.json, or the same facts of genai_config.json; {} if a folder has neither.

    Raises:
        CheckpointError: the file is damaged.
    """
    if (folder / CONFIG_FILE).is_file():
        return read_json(folder / CONFIG_FILE)
    return read_config(folder) if (folder / GENAI_FILE).is_file() else {}


def stated_lengths(config: Mapping[str, Any], facts: GraphFacts) -> ContextLengths | None:
    """Return the context lengths of an ONNX file; None if nothing states them.

    Args:
        config: the content of the config.json beside it; may be empty.
        facts: of the graph. Its position tables bound the lengths, as some exporters write a default into
            genai_config.json.

    Raises:
        CheckpointError: ``config`` is invalid.
    """
    limit, text = facts.position_limit, facts.stated_length
    lengths: ContextLengths | None = None
    if states_length(config):
        lengths = ContextLengths(*context_lengths(config))
    elif text is not None:
        if not text.isdecimal():
            raise CheckpointError(f"the graph's metadata '{CONTEXT_LENGTH}' is not a number: {text!r}")
        lengths = ContextLengths(int(text), int(text))
    if lengths is None:
        return None if limit is None else ContextLengths(limit, limit)
    return lengths if limit is None else ContextLengths(*(min(length, limit) for length in lengths))
