"""The format of answers as ``response_template`` of a tokenizer states it (transformers 5).

A response template tells how transformers parses an answer: fields between delimiters, which are texts or
regular expressions. It is read as data for the parser and the grammar here, and its expressions are never
run: those of a model's file could take forever. Delimiters of texts, optional whitespace and a group for
the name are understood; a field with other expressions is left to the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....records import dataclass
from .formats import ARGUMENTS, NAME, CallFormat, Thought

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
# What an expression may have besides plain characters: whitespace, and groups.
_SPACE = re.compile(r"\\s[*+]?|\\n[*?+]?")
_GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)")
_ESCAPED = re.compile(r"\\([^\w\s])")
_META = frozenset("\\.^$*+?{}[]|()")


@dataclass(frozen=True, slots=True)
class StatedFormat:
    """What a response template tells.

    Args:
        thought: None if it has none, or its delimiters are not understood.
        calls: the same of calls.
        text: the delimiters of the text of the answer; None if it has none.
        notes: what is not understood, in words.
    """

    thought: Thought | None = None
    calls: CallFormat | None = None
    text: tuple[str, str] | None = None
    notes: tuple[str, ...] = ()


class _NotUnderstood(Exception):  # noqa: N818 -- it becomes a note
    pass


def stated_format(template: Any) -> StatedFormat:
    """Return what a response template, the JSON value in tokenizer_config.json, tells."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return StatedFormat(notes=("response_template: it has no fields",))
    notes: list[str] = []
    thought: Thought | None = None
    calls: CallFormat | None = None
    text: tuple[str, str] | None = None
    for name, field in fields.items():
        try:
            if name in _REASONING:
                thought = Thought(_delimiter(field, "open").strip(), _delimiter(field, "close").strip())
            elif name == "tool_calls":
                calls = _calls(field)
            elif name == "content" and isinstance(field, Mapping) and {"open", "open_pattern"} & set(field):
                text = _delimiter(field, "open"), _delimiter(field, "close")
        except _NotUnderstood as error:
            notes.append(f"response_template: {name}: {error}")
    return StatedFormat(thought, calls, text, tuple(notes))


def _calls(field: Any) -> CallFormat:
    opening, close = _delimiter(field, "open"), _delimiter(field, "close")
    content, args = field.get("content", "text"), field.get("content_args") or {}
    name, arguments = _function(field.get("transform"))
    if not isinstance(args, Mapping):
        raise _NotUnderstood("content_args is no object")
    shared: dict[str, Any] = {
        "head": opening,
        "close": close,
        "separator": "\n",
        "single": not field.get("repeats"),
    }
    if NAME in opening and name != ("name",):
        raise _NotUnderstood("the name is not that of the delimiter")
    if content == "json" and NAME in opening:
        if not args:
            return CallFormat("json", **shared)
        quotes = tuple(pair[0] for pair in args.get("string_delims", ()) if len(set(pair)) == 1)
        return CallFormat("literal", **{**shared, "quotes": (*quotes, '"')})
    if content == "json":
        return _objects(shared, name, arguments, listed=bool(field.get("transform_each")))
    if content == "xml-inline" and NAME in opening:
        return _pairs(shared, args.get("tag_pattern"))
    if content == "python-call-list":
        return CallFormat(
            "literal", opening=f"{opening}[", head=NAME, separator=", ", closing=f"]{close}",
            quotes=('"', "'"), assign="=", brackets="()",
        )  # fmt: skip
    raise _NotUnderstood(f"calls with the content {content!r} are not read")


def _objects(
    shared: Mapping[str, Any], name: tuple[str, ...], arguments: tuple[str, ...], *, listed: bool
) -> CallFormat:
    """Return calls as JSON objects: one between delimiters, or a list of them."""
    name_key, argument_key = (name or ("name",))[-1], (arguments or ("arguments",))[-1]
    envelope = f'{{"{name_key}": "{NAME}", "{argument_key}": {ARGUMENTS}}}'
    keys: dict[str, Any] = {"name_keys": (name_key,), "argument_keys": (argument_key,), "envelope": envelope}
    head, close = shared["head"], shared["close"]
    if listed:
        return CallFormat(
            "object", opening=f"{head}[", listed=True, separator=", ", closing=f"]{close}", **keys
        )
    return CallFormat("object", **{**shared, "head": f"{head}\n", "close": f"\n{close}"}, **keys)


def _pairs(shared: Mapping[str, Any], pattern: Any) -> CallFormat:
    """Return calls of text between tags; ``pattern`` has the groups ``key`` and ``value``."""
    if not isinstance(pattern, str):
        raise _NotUnderstood("tag_pattern is missing")
    groups = {found[1]: found.span() for found in _GROUP.finditer(pattern)}
    if set(groups) != {"key", "value"} or groups["key"] > groups["value"]:
        raise _NotUnderstood("tag_pattern has not the groups key and value, in this order")
    before, between, after = (
        _text(part, space="\n")
        for part in (
            pattern[: groups["key"][0]],
            pattern[groups["key"][1] : groups["value"][0]],
            pattern[groups["value"][1] :],
        )
    )
    shared = {**shared, "head": f"{shared['head']}\n", "close": f"\n{shared['close']}"}
    opens, ends = (between, between), f"{after}\n"
    return CallFormat("pairs", **shared, key_open=before, value_opens=opens, value_close=ends)


def _function(transform: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of name and arguments in the content of a call; empty for those of OpenAI's form."""
    if not isinstance(transform, Mapping):
        raise _NotUnderstood("calls have no transform")
    function = transform.get("function", transform)
    if isinstance(function, str):
        if _path(function) != ("content",):
            raise _NotUnderstood(f"the function {function!r} is not the content")
        return (), ()
    if not isinstance(function, Mapping):
        raise _NotUnderstood("calls have no function")
    return _path(function.get("name")), _path(function.get("arguments"))


def _path(place: Any) -> tuple[str, ...]:
    found = _PLACE.fullmatch(place) if isinstance(place, str) else None
    if found is None:
        raise _NotUnderstood(f"{place!r} is no place")
    return tuple(found[1].split("."))


def _delimiter(field: Any, name: str) -> str:
    """Return a delimiter as text, with ``NAME`` where the name of a function is.

    Raises:
        _NotUnderstood: it is an expression of another kind, or missing.
    """
    if not isinstance(field, Mapping):
        raise _NotUnderstood("it is no object")
    text, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(text, list) and text:
        text = text[0]
    if isinstance(text, str) and text.strip():
        return text
    if not isinstance(pattern, str):
        raise _NotUnderstood(f"'{name}' is missing")
    return _text(pattern)


def _text(pattern: str, space: str = "") -> str:
    """Return the text of an expression without choices, with ``space`` for whitespace that may be there."""
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        blank, group = _SPACE.match(pattern, position), _GROUP.match(pattern, position)
        escaped = _ESCAPED.match(pattern, position)
        if blank is not None:
            parts.append(space)
            position = blank.end()
        elif group is not None and group[1] == "name":
            parts.append(NAME)
            position = group.end()
        elif escaped is not None:
            parts.append(escaped[1])
            position = escaped.end()
        elif pattern[position] not in _META and pattern[position] not in "\r":
            parts.append(pattern[position])
            position += 1
        else:
            raise _NotUnderstood(f"the expression {pattern[:80]!r} is not understood")
        if position < len(pattern) and pattern[position] in "*+?{" and blank is None:
            raise _NotUnderstood(f"the expression {pattern[:80]!r} is not understood")
    text = "".join(parts)
    if not text.strip():
        raise _NotUnderstood("a delimiter is empty")
    return text
