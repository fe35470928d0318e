"""Answers that must be tool calls: their JSON schema, and the parser of such answers.

A grammar constrains the answer to ``[{"name": ..., "arguments": {...}}, ...]``. The chat template's own
format is not used, so that the form also works for models that were not trained to call tools.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import RequestError
from ...text.parsers.json_span import JsonSpan
from ...types.outputs import ToolCall

_HEAD = re.compile(r'[\[\],}\s]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call.

    Args:
        index: the index of the call in the answer.
        arguments: the next piece of the arguments' JSON text.
        id: the call's id, in its first piece only.
        name: the function's name, in the first piece only.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


def calls_schema(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of an answer that consists of tool calls.

    Args:
        tools: the tools that may be called, in the form of chat templates.
        parallel: whether the answer may hold several calls.

    Raises:
        RequestError: there are no tools.
    """
    if not tools:
        raise RequestError("'tool_choice' demands a call, but the request's tools are: none")
    definitions: dict[str, Any] = {}
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool["function"], definitions) for tool in tools]},
    }
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one call; its ``$defs`` move to the root, since references start there."""
    parameters = dict(function.get("parameters") or {"type": "object"})
    for key in ("$defs", "definitions"):
        for name, schema in dict(parameters.pop(key, None) or {}).items():
            definitions[f"{function['name']}.{name}"] = _moved(schema, function["name"])
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(parameters, function["name"]),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, prefix: str) -> Any:
    """Return a schema with references changed to the definitions named ``prefix.NAME`` at the root."""
    if isinstance(schema, list):
        return [_moved(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, prefix) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        moved["$ref"] = re.sub(r"^#/(?:\$defs|definitions)/", f"#/$defs/{prefix}.", reference)
    return moved


class CallSplitter:
    """Parses an answer of tool calls incrementally."""

    def __init__(self) -> None:
        self._text = ""
        self._span: JsonSpan | None = None  # of the current call's arguments
        self._sent = 0  # characters of the arguments yielded so far
        self._index = -1

    def push(self, text: str) -> Iterator[CallDelta]:
        """Add text and yield the new pieces of the calls."""
        self._text += text
        while self._span is not None or (head := _HEAD.match(self._text)):
            if self._span is None and head:
                self._text, self._span, self._sent = self._text[head.end() :], JsonSpan(), 0
                self._index += 1
                # Mistral's templates require ids of nine letters and digits.
                yield CallDelta(self._index, "", secrets.token_hex(5)[:9], json.loads(head[1]))
            if not self._sent:
                self._text = self._text.lstrip()
            if self._span is None or not self._text:
                return
            end = self._span.end(self._text)
            new = self._text[self._sent : end]
            self._sent += len(new)
            if new:
                yield CallDelta(self._index, new)
            if end is None:
                return
            self._text, self._span = self._text[end:], None


def read_calls(text: str) -> list[ToolCall]:
    """Return all calls of an answer; a truncated answer may end with an incomplete call."""
    calls: list[ToolCall] = []
    for delta in CallSplitter().push(text):
        if delta.name is not None:
            calls.append(ToolCall(delta.id or "", delta.name, ""))
        else:
            last = calls[-1]
            calls[-1] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return calls
