"""Parse large JSON in a thread, without stopping the other threads.

``json.loads`` keeps the lock of Python until it ends: 0.06 s for 16 MiB of text, 4 s for 16 MiB of `[]`.
Here arrays and objects are read by Python code, which gives the lock away every 5 ms, and long strings and
arrays of numbers by pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed omits it
from typing import Any

from ...errors import RequestError

SMALL = 65536  # bytes, of which json.loads takes at most 2 ms
_PIECE = 65536  # characters
_RUN = 64  # characters of numbers that are worth a call
# The garbage collector visits all of them at once; 200,000 take 10 ms.
_MOST_CONTAINERS = 200_000
_SPACE = re.compile(r"[ \t\n\r]*")
# Before an escape that does not complete a surrogate pair, or far from every escape.
_SPLIT = re.compile(r"(?<!\\)(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?=\\)|(?<=[^\\]{12})")


def parse(raw: bytes, constant: Callable[[str], Any]) -> Any:
    """Return the value of a JSON text, as ``json.loads`` does.

    Args:
        raw: the text in UTF-8, UTF-16 or UTF-32.
        constant: called with NaN, Infinity or -Infinity.

    Raises:
        RequestError: it has more than 200,000 arrays and objects.
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    reader = _Reader(text, constant)
    value, end = reader.value(reader.space(0))
    if (end := reader.space(end)) != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Reads values; every method takes the place where one begins, and returns it and its end."""

    def __init__(self, text: str, constant: Callable[[str], Any]) -> None:
        self._text = text
        decoder: Any = json.JSONDecoder(parse_constant=constant)
        self._scalar = decoder.scan_once
        self._numbers = re.compile(rf"[-+0-9.eE, \t\n\r]{{0,{_PIECE}}}")
        self._containers = 0

    def space(self, at: int) -> int:
        """Return the end of the white space at a place."""
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def value(self, at: int) -> tuple[Any, int]:
        """Read any value."""
        match self._text[at : at + 1]:
            case "[":
                return self._array(at + 1)
            case "{":
                return self._object(at + 1)
            case '"':
                return self._string(at + 1)
        try:
            value, end = self._scalar(self._text, at)
        except StopIteration as error:
            raise JSONDecodeError("Expecting value", self._text, error.value) from None
        return value, end

    def _array(self, at: int) -> tuple[list[Any], int]:
        self._count()
        values: list[Any] = []
        at = self.space(at)
        if self._text.startswith("]", at):
            return values, at + 1
        while True:
            at = self._add_numbers(values, at)
            value, at = self.value(at)
            values.append(value)
            at = self.space(at)
            if self._text.startswith("]", at):
                return values, at + 1
            at = self._after(",", "Expecting ',' delimiter", at)

    def _add_numbers(self, values: list[Any], at: int) -> int:
        """Add the numbers of a long run but the last; return the place of the next value."""
        while True:
            run = self._numbers.match(self._text, at)
            end = self._text.rfind(",", at, run.end()) if run else -1
            if end < at + _RUN:
                return at
            try:
                values += json.loads(f"[{self._text[at:end]}]")
            except JSONDecodeError as error:
                raise JSONDecodeError(error.msg, self._text, at + error.pos - 1) from None
            at = self.space(end + 1)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        self._count()
        members: dict[str, Any] = {}
        at = self.space(at)
        if self._text.startswith("}", at):
            return members, at + 1
        while True:
            at = self._after('"', "Expecting property name enclosed in double quotes", at, space=False)
            key, at = self._string(at)
            at = self._after(":", "Expecting ':' delimiter", self.space(at))
            members[key], at = self.value(at)
            at = self.space(at)
            if self._text.startswith("}", at):
                return members, at + 1
            at = self._after(",", "Expecting ',' delimiter", at)

    def _string(self, at: int) -> tuple[str, int]:
        """Read a string from the character after its quote."""
        begin, pieces = at, []
        while self._text.find('"', at, at + _PIECE) < 0:
            cut = _SPLIT.search(self._text, at + _PIECE, at + 2 * _PIECE)
            if cut is None or cut.start() >= len(self._text):
                break
            piece = self._text[at : cut.start()]
            value, end = self._scanned(f'{piece}"', at)
            pieces.append(value)
            if end <= len(piece):
                return "".join(pieces), at + end
            at = cut.start()
        try:
            value, end = scanstring(self._text, at)
        except JSONDecodeError as error:
            place = begin - 1 if error.msg.startswith("Unterminated") else error.pos
            raise JSONDecodeError(error.msg, self._text, place) from None
        return "".join([*pieces, value]), end

    def _scanned(self, piece: str, at: int) -> tuple[str, int]:
        """Read a piece of a string, which begins at a place."""
        try:
            found: tuple[str, int] = scanstring(piece, 0)
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, self._text, at + error.pos) from None
        return found

    def _after(self, character: str, otherwise: str, at: int, *, space: bool = True) -> int:
        if not self._text.startswith(character, at):
            raise JSONDecodeError(otherwise, self._text, at)
        return self.space(at + 1) if space else at + 1

    def _count(self) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise RequestError(f"the body has more than {_MOST_CONTAINERS:,} arrays and objects")
