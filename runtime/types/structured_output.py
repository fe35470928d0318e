"""Structured output: the format that a request's output must have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ...errors import InvalidSamplingError
from ...options import shown
from ...records import dataclass

_MAX_CHARACTERS = {"json_schema": 1 << 18}  # the others: 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The format of an output; exactly one field is set.

    Args:
        json_schema: a JSON schema, as an object, true, false, or JSON text.
        json_object: True for any JSON object.
        regex: a regular expression (Rust syntax) that the whole output must match.
        grammar: a context-free grammar in the Lark syntax of llguidance, or in llama.cpp's GBNF.
        choice: the output must be one of these texts.

    Raises:
        InvalidSamplingError: none or several are given, or one is of the wrong type or too large.
    """

    json_schema: str | bool | Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.choice, str) or not isinstance(self.choice, Iterable):
            raise InvalidSamplingError(f"choice must be a list of texts, not {shown(self.choice)}")
        object.__setattr__(self, "choice", tuple(self.choice))
        options = [field.name for field in dataclasses.fields(self)]
        given = [name for name in options if self._is_given(name)]
        if len(given) != 1:
            raise InvalidSamplingError(f"structured_output needs one of {', '.join(options)}, not {given}")
        name, value = given[0], getattr(self, given[0])
        texts = all(isinstance(text, str) for text in self.choice)
        if not texts or not isinstance(value, _TYPES.get(name, str)):
            raise InvalidSamplingError(f"{name} of structured_output cannot be {shown(value)}")
        size, most = len(self.key[1]), _MAX_CHARACTERS.get(name, 1 << 16)
        if size > most:
            raise InvalidSamplingError(f"{name} has {size} characters, more than {most}")

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        if name == "json_schema":
            return value is not None
        return not (value is None or value is False or (isinstance(value, tuple) and not value))

    @classmethod
    def of(cls, value: Any) -> Self:
        """Build from a mapping, such as a JSON object; a ``StructuredOutput`` is returned as it is.

        Raises:
            InvalidSamplingError: the value has another type, or an unknown or invalid field.
        """
        if isinstance(value, cls):
            return value
        try:
            return cls(**value)
        except TypeError as error:
            raise InvalidSamplingError(f"structured_output cannot be {shown(value)}: {error}") from error

    @property
    def key(self) -> tuple[str, str]:
        """The kind and the text of the format; equal formats have equal keys."""
        if self.json_schema is not None:
            schema = self.json_schema
            return "json_schema", schema if isinstance(schema, str) else _json(schema)
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            return "grammar", self.grammar
        return ("choice", _json(self.choice)) if self.choice else ("json_object", "")


_TYPES: dict[str, Any] = {"json_schema": (str, bool, Mapping), "json_object": bool, "choice": tuple}


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSamplingError(f"structured_output is not valid JSON: {error}") from error
