"""The base of message parsers, which split a streamed answer into content, reasoning and tool calls."""

from __future__ import annotations

import abc
import json
import secrets
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from ....records import dataclass
from ...types.outputs import ToolCall


class StrippedText:
    """Text that grows by pieces, without leading whitespace, and without trailing whitespace so far."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self._pieces)

    @property
    def mark(self) -> int:
        """The current end, for ``between``."""
        return len(self._pieces)

    def add(self, piece: str) -> None:
        """Append a piece."""
        piece = self._held + piece if self._pieces else piece.lstrip()
        kept = piece.rstrip()
        if kept:
            self._pieces.append(kept)
        self._held = piece[len(kept) :]

    def between(self, start: int, stop: int) -> str:
        """Return the text between two marks."""
        return "".join(self._pieces[start:stop])


@dataclass(slots=True)
class ParsedMessage:
    """The parsed part of a message."""

    content: StrippedText = field(default_factory=StrippedText)
    reasoning: StrippedText = field(default_factory=StrippedText)
    tool_calls: list[ToolCall] = field(default_factory=list)  # in pieces; see ``ToolCall``

    def call(self, name: str, arguments: str) -> None:
        """Add a tool call."""
        # Mistral's templates require ids of nine letters and digits.
        self.tool_calls.append(ToolCall(secrets.token_hex(5)[:9], name, arguments))

    def continue_call(self, arguments: str) -> None:
        """Add a piece to the arguments of the last call."""
        if arguments:
            self.tool_calls.append(ToolCall("", "", arguments))

    def call_json(
        self, text: str, name_keys: Sequence[str] = ("name",), argument_keys: Sequence[str] = ("arguments",)
    ) -> bool:
        """Add the tool calls of a JSON object or list; return False, adding none, if it is no tool call.

        Args:
            text: JSON.
            name_keys: the path to the name; empty if the object is ``{name: arguments}``.
            argument_keys: the path to the arguments.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        items = value if isinstance(value, list) else [value]
        calls = [_call_of(item, name_keys, argument_keys) for item in items]
        if not calls or not all(calls):
            return False
        for call in calls:
            if call is not None:
                self.call(*call)
        return True


class MessageParser(abc.ABC):
    """Parse a message that arrives in pieces; the result does not depend on how it is cut.

    Text that looks like a tool call but is invalid becomes content, so nothing is lost. Once the arguments
    of a call have begun, it stays a call, because they are passed on as they arrive. A call that is cut
    before its arguments is a call without arguments if its name is known, else it is left out: its
    beginning is markup, and no text of the answer.

    Args:
        message: receives the parsed parts.

    Attributes:
        needs_special_tokens: whether the style uses special tokens, which are usually left out of the text.
    """

    needs_special_tokens = True

    def __init__(self, message: ParsedMessage) -> None:
        self.message = message
        self._text = ""  # not parsed yet
        self._cut = False  # whether the message ended before the model ended it

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text
        while self._advance(final=False):
            pass

    def end(self, *, cut: bool = False) -> None:
        """Parse the rest: no more text follows.

        Args:
            cut: the model did not end the message, such as at a limit of tokens.
        """
        self._cut = cut
        while self._advance(final=True):
            pass

    @abc.abstractmethod
    def _advance(self, *, final: bool) -> bool:
        """Parse the next part of the text; return whether there may be more to parse.

        Args:
            final: no more text follows, so nothing may be held back.
        """

    def _until(self, *markers: str, final: bool) -> tuple[str, str]:
        """Remove and return the text before the first of the markers, and the marker.

        If there is no marker, return the text that cannot be the start of one, and "".
        """
        places = [(at, -len(marker), marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        at, _, marker = min(places, default=(len(self._text), 0, ""))
        if not marker and not final:
            at -= max((overlap(self._text, text) for text in markers), default=0)
        text, self._text = self._text[:at], self._text[at + len(marker) :]
        return text, marker


def _call_of(value: Any, name_keys: Sequence[str], argument_keys: Sequence[str]) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON text; models write them as an object or as JSON text."""
    if not isinstance(value, dict):
        return None
    if not name_keys:
        if len(value) != 1:
            return None
        ((name, arguments),) = value.items()
        return (
            (name, json.dumps(arguments, ensure_ascii=False))
            if name and isinstance(arguments, dict)
            else None
        )
    name = _at(value, name_keys)
    arguments = _at(value, argument_keys)
    if not isinstance(name, str):
        name = value.get("name")
    if arguments is None:
        arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` with which ``marker`` begins."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
