"""The form of calls, read from texts that a chat template wrote."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .formats import ARGUMENTS, INDEX, LLAMA, NAME, CallFormat, tags

KEYS, VALUES = ("xq_key_a", "xq_key_b"), ("xqvala", "xqvalb")
"""The arguments of calls in the texts; they hold nothing that a template could change."""


class UnknownFormError(Exception):
    """Something cannot be derived; the message tells what."""


def shared_start(*texts: str) -> str:
    """Return the text that all begin with."""
    shortest = min(texts, key=len)
    for at, character in enumerate(shortest):
        if any(text[at] != character for text in texts):
            return shortest[:at]
    return shortest


def shared_end(first: str, second: str) -> str:
    """Return the text that both end with, from its first whole tag."""
    shared = shared_start(first[::-1], second[::-1])[::-1]
    starts = [len(text) - len(shared) for text in (first, second)]
    if any(tag_start(text, at) != at for text, at in zip((first, second), starts, strict=True)):
        shared = shared[shared.find(">") + 1 :]
    return shared.lstrip(">])}\"'|\\/ \t\r\n")


def up_to_tag(text: str) -> str:
    """Return a text up to the end of its last tag, since texts may share the beginning of the next."""
    end = max(text.rfind(">"), text.rfind("]"), text.rfind(")"), text.rfind("}"))
    return text[: end + 1]


def tag_start(text: str, at: int) -> int:
    """Return the start of the tag that a position is in, the position itself if it is in none."""
    opened, closed = text.rfind("<", 0, at), text.rfind(">", 0, at)
    return opened if opened > closed else at


def without_end(tail: str, end: str) -> str:
    """Return a text without the tags at its end that another text ends with too."""
    shared = shared_start(tail[::-1], end[::-1])[::-1]
    first = re.search(r"[<\[]|\s+[<\[]", shared)
    return tail[: len(tail) - len(shared) + first.start()] if first is not None else tail


class CallForm:
    """Reads the form of calls from texts with slots for names and ids.

    Args:
        one: a call of one argument, and what follows.
        two: two such calls; empty if the template takes one.
        pair: a call of two arguments.
        end: what follows an answer of text.
    """

    def __init__(self, one: str, two: str, pair: str, end: str) -> None:
        self._one, self._two, self._pair, self._end = one, two, pair, end

    def read(self) -> CallFormat:
        """Return the form.

        Raises:
            UnknownFormError: it is none of those that are known.
        """
        arguments = _json_span(self._one, {KEYS[0]: VALUES[0]})
        if arguments is not None:
            return self._of_json(*arguments)
        return self._of_tags()

    # --- JSON

    def _of_json(self, start: int, end: int) -> CallFormat:
        span = _object_around(self._one, start, end)
        if span is None:
            head, tail = self._one[:start], self._one[end:]
            between = self._between(lambda text: _json_span(text, {KEYS[0]: VALUES[0]}))
            opening, head, close, separator, closing = _sections(head, between, tail, self._end)
            return CallFormat("json", opening, head, close, separator, closing, single=not self._two)
        begin, stop = span
        envelope = self._one[begin:start] + ARGUMENTS + self._one[end:stop]
        name_keys, argument_keys = _paths(self._one[begin:stop])
        between = self._between(lambda text: _next_object(text, begin))
        head, tail = self._one[:begin], self._one[stop:]
        bare = between.strip() if between is not None else None
        if head.rstrip().endswith("[") and tail.lstrip().startswith("]"):
            separator = between or ", "
            opening, closing = head, without_end(tail, self._end)
            return CallFormat(
                "object", opening, "", "", separator, closing, name_keys, argument_keys, listed=True,
                envelope=envelope, single=not self._two,
            )  # fmt: skip
        if bare == "" or bare in (",", ";"):
            opening, closing = head, without_end(tail, self._end)
            form = CallFormat("object", opening, "", "", between or "", closing, name_keys, argument_keys,
                              envelope=envelope)  # fmt: skip
            return form if form.marker else dataclasses.replace(form, alternative=LLAMA.alternative)
        opening, head, close, separator, closing = _sections(head, between, tail, self._end)
        form = CallFormat("object", opening, head, close, separator, closing, name_keys, argument_keys,
                          envelope=envelope, single=not self._two)  # fmt: skip
        return form if form.marker else dataclasses.replace(form, alternative=LLAMA.alternative)

    def _between(self, span_of: Callable[[str], tuple[int, int] | None]) -> str | None:
        """Return what is between the arguments, or the object, of a call and those of the next."""
        if not self._two:
            return None
        first = span_of(self._two)
        if first is None:
            raise UnknownFormError("two calls have another form than one")
        rest = self._two[first[1] :]
        second = span_of(rest) if NAME in rest else None
        if second is None:
            raise UnknownFormError("two calls have another form than one")
        return rest[: second[0]]

    # --- tags

    def _of_tags(self) -> CallFormat:
        key = self._one.find(KEYS[0])
        value = self._one.find(VALUES[0], key + 1)
        if key < 0 or value < 0:
            raise UnknownFormError("the arguments have no keys")
        at = self._one.rfind(NAME, 0, key) + len(NAME)
        if at < len(NAME):
            raise UnknownFormError("the arguments come before the name")
        middle, assign = self._one[at:key], self._one[key + len(KEYS[0]) : value]
        tail = self._one[value + len(VALUES[0]) :]
        second = self._pair.find(KEYS[1])
        first = self._pair.find(VALUES[0])
        if second < first:
            raise UnknownFormError("arguments have another form than one argument")
        between = self._pair[first + len(VALUES[0]) : second]
        head = self._one[:at]
        if middle in ("(", "{") and re.fullmatch(r"\s*[=:]\s*\S.*", assign, re.DOTALL):
            return self._of_literals(head, middle, assign, between, tail)
        return self._of_pairs(head, middle, assign, between, tail)

    def _of_literals(self, head: str, bracket: str, assign: str, between: str, tail: str) -> CallFormat:
        sign = assign.strip()[0]
        quote = assign.strip()[1:].strip()
        if not between.startswith(quote) or not quote:
            raise UnknownFormError("texts have no quotes")
        closer = {"(": ")", "{": "}"}[bracket]
        if not tail.startswith(quote + closer):
            raise UnknownFormError("the arguments have no closing bracket")
        tail = tail[len(quote) + 1 :]
        start = self._two.find(VALUES[0])
        calls = None
        if self._two:
            rest = self._two[start + len(VALUES[0]) + len(quote) + 1 :]
            calls = rest[: rest.rfind(NAME) + len(NAME)] if NAME in rest else None
        opening, head, close, separator, closing = _sections(head, calls, tail, self._end)
        quotes = (quote,) if len(quote) > 1 else (quote, "'" if quote == '"' else '"')
        return CallFormat("literal", opening, head, close, separator, closing, quotes=quotes, assign=sign,
                          brackets=bracket + closer, single=not self._two)  # fmt: skip

    def _of_pairs(self, head: str, middle: str, assign: str, between: str, tail: str) -> CallFormat:
        key_open = shared_end(middle, between)
        value_close = between.removesuffix(key_open)
        if not key_open or not tags(value_close) or not tail.startswith(value_close.rstrip()):
            raise UnknownFormError("arguments are not between tags that repeat")
        stripped = value_close.rstrip()
        tail = tail[len(stripped) :]
        head += middle.removesuffix(key_open)
        calls = None
        if self._two:
            start = self._two.find(VALUES[0]) + len(VALUES[0]) + len(stripped)
            rest = self._two[start:]
            stop = rest.find(key_open)
            calls = rest[:stop] if NAME in rest[: max(stop, 0)] else None
        opening, head, close, separator, closing = _sections(head, calls, tail, self._end)
        return CallFormat(
            "pairs", opening, head, close, separator, closing, key_open=key_open,
            value_opens=(assign, assign), value_close=value_close, single=not self._two,
        )  # fmt: skip


def _sections(head: str, between: str | None, tail: str, end: str) -> tuple[str, str, str, str, str]:
    """Return opening, head, close, separator and closing.

    Args:
        head: before the arguments of the first call.
        between: from behind the arguments of the first call to those of the second; None if there is none.
        tail: behind the arguments of the last call.
        end: what ends a turn.
    """
    head = re.sub(r":0(?=\W)", f":{INDEX}", head) if between and re.search(r":1(?=\W)", between) else head
    between = re.sub(r":1(?=\W)", f":{INDEX}", between) if between and INDEX in head else between
    if between is None:
        return "", head.lstrip(), without_end(tail, end), "\n", ""
    inner = shared_end(head, between)
    if NAME not in inner and NAME in head and inner != head.lstrip():
        inner = inner or ""
    opening = head.removesuffix(inner)
    before = between.removesuffix(inner)
    if not opening.strip():
        shared = shared_start(before, tail)
        close = before.rstrip() if tail.startswith(before.rstrip()) else up_to_tag(shared)
        return "", inner, close, before[len(close) :], ""
    close = (
        before.rstrip(" \t\r\n,")
        if tail.startswith(before.rstrip(" \t\r\n,"))
        else up_to_tag(shared_start(before, tail))
    )
    separator, closing = before[len(close) :], without_end(tail[len(close) :], end)
    return opening.lstrip(), inner, close, separator, closing


def _json_span(text: str, value: Any) -> tuple[int, int] | None:
    """Return where a text has a value in JSON."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            found, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if found == value:
            return match.start(), end
    return None


def _object_around(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return where the object is that has a name and these arguments; None if they are in none."""
    decoder = json.JSONDecoder(strict=False)
    for match in re.finditer(r"\{", text[:start]):
        try:
            found, stop = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if stop > end and isinstance(found, dict):
            return match.start(), stop
    return None


def _next_object(text: str, start: int) -> tuple[int, int] | None:
    """Return where the first object with a name and arguments is."""
    arguments = _json_span(text, {KEYS[0]: VALUES[0]})
    return None if arguments is None else _object_around(text, *arguments)


def _paths(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of keys to the name and to the arguments."""
    value = json.loads(text, strict=False)
    name, arguments = _path(value, NAME), _path(value, {KEYS[0]: VALUES[0]})
    if arguments is None:
        raise UnknownFormError("the object has no arguments")
    if name is None:
        if arguments == (NAME,):
            return (), ()
        raise UnknownFormError("the object has no name")
    return name, arguments


def _path(value: Any, target: Any) -> tuple[str, ...] | None:
    if value == target:
        return ()
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if (path := _path(item, target)) is not None:
            return (key, *path)
    return None
