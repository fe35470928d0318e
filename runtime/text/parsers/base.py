"""How a message is taken apart while it arrives."""

from __future__ import annotations

import abc
import json
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...types.outputs import ToolCall


class StrippedText:
    """Grows by pieces, less the whitespace at its beginning and, as long as nothing follows, at its end."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._pieces)

    @property
    def mark(self) -> int:
        """Where it ends now, for ``between``."""
        return len(self._pieces)

    def add(self, piece: str) -> None:
        """Append a piece."""
        piece = self._held + piece if self._pieces else piece.lstrip()
        kept = piece.rstrip()
        if kept:
            self._pieces.append(kept)
        self._held = piece[len(kept) :]

    def between(self, start: int, stop: int) -> str:
        """What was added between two marks."""
        return "".join(self._pieces[start:stop])


@dataclass(slots=True)
class Message:
    """What has been understood so far."""

    content: StrippedText = field(default_factory=StrippedText)
    reasoning: StrippedText = field(default_factory=StrippedText)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def call(self, name: str, arguments: str) -> None:
        """Add a tool call."""
        # Nine letters and digits are what Mistral's templates demand of an id.
        self.tool_calls.append(ToolCall(secrets.token_hex(5)[:9], name, arguments))

    def call_json(self, text: str) -> bool:
        """Add the calls that a JSON object, or a list of them, describes; False if it describes none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(map(_is_call, calls)):
            return False
        for call in calls:
            self.call(call["name"], _arguments(call))
        return True


class MessageParser(abc.ABC):
    """Reads a message in pieces; how it is cut changes nothing.

    What looks like a tool call but cannot be read as one is content, so nothing is lost.

    Args:
        message: takes what is understood.

    Attributes:
        marker: a text that chat templates of this style contain.
        needs_special_tokens: whether the style is written with tokens that are usually left out of a text.
    """

    marker: ClassVar[str] = ""
    needs_special_tokens: ClassVar[bool] = True

    def __init__(self, message: Message) -> None:
        self.message = message
        self._text = ""  # what is not understood yet

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text
        while self._advance(final=False):
            pass

    def end(self) -> None:
        """Understand the rest: no more text will come."""
        while self._advance(final=True):
            pass

    @abc.abstractmethod
    def _advance(self, *, final: bool) -> bool:
        """Take something from the text; return whether there may be more to take.

        Args:
            final: no more text will come; nothing may be held back.
        """

    def _until(self, *markers: str, final: bool) -> tuple[str, str]:
        """Take the text before the first of the markers, and the marker.

        Without one, take what cannot be its beginning, and "".
        """
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        at, marker = min(found, default=(len(self._text), ""))
        if not marker and not final:
            at -= max(overlap(self._text, one) for one in markers)
        text, self._text = self._text[:at], self._text[at + len(marker) :]
        return text, marker


class PlainParser(MessageParser):
    """All is content."""

    needs_special_tokens = False

    def _advance(self, *, final: bool) -> bool:
        self.message.content.add(self._text)
        self._text = ""
        return False


def is_json(text: str) -> bool:
    """Whether a text is a JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _arguments(call: dict[str, Any]) -> str:
    """The arguments as JSON text; models write them as an object, some as its text."""
    given = call.get("arguments", call.get("parameters", {}))
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of ``text`` with which ``marker`` begins."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
