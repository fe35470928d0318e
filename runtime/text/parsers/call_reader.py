"""Read a tool call, a JSON object, while it arrives, so that its arguments can be passed on in pieces."""

from __future__ import annotations

import json
import re

from .base import ParsedMessage
from .json_span import JsonSpan

# The usual form only, with an id or the like between; any other object is parsed when it is complete.
_MEMBER = r'\s*"[\w-]+"\s*:\s*"[^"\\]*"\s*,'
_HEAD = re.compile(rf'\s*\{{(?P<members>(?:{_MEMBER}){{1,4}})\s*"(?P<key>[\w-]+)"\s*:\s*(?=\{{)')
_ARGUMENTS = ("arguments", "parameters")


def _head(text: str, key: str) -> tuple[str, int] | None:
    """Return the name of a call whose arguments begin, and where they do."""
    head = _HEAD.match(text)
    if head is None or head["key"] not in _ARGUMENTS:
        return None
    members = json.loads("{" + head["members"].rstrip().removesuffix(",") + "}", strict=False)
    name = members.get(key) or members.get("name")
    return (name, head.end()) if name else None


def name_of_cut(text: str, key: str) -> str:
    """Return the name in the beginning of a call's object; empty if it is cut before the name's end."""
    found = re.match(rf'\s*\{{(?:{_MEMBER})*?\s*"{re.escape(key)}"\s*:\s*"(?P<name>[^"\\]+)"', text)
    return found["name"] if found is not None else ""


class CallReader:
    """Reads one object ``{"name": ..., "arguments": {...}}``; the keys may have other names.

    A call exists once its arguments have begun. If the text ends too early, they are incomplete.

    Args:
        message: receives the call.
        key: the key of the name.

    Attributes:
        done: whether the end of the object was read.
    """

    def __init__(self, message: ParsedMessage, key: str) -> None:
        self.done = False
        self._message, self._key = message, key
        self._arguments: ArgumentsReader | None = None
        self._tail = ""
        self._span = JsonSpan(depth=1)  # of what follows the arguments

    @property
    def in_text(self) -> bool:
        """Whether a tag would be part of a text."""
        return self._arguments is not None and (self._arguments.in_text or self._span.in_text)

    @staticmethod
    def begins(text: str, key: str) -> bool:
        """Return whether a text begins with a call up to its arguments; ``key`` is the name's."""
        return _head(text, key) is not None

    def read(self, text: str, *, final: bool = False) -> str:
        """Read the next text, and return what follows the object. The first text must begin the call."""
        if self._arguments is None:
            head = _head(text, self._key)
            if head is None:
                raise ValueError("the text does not begin a call")
            self._arguments = ArgumentsReader(self._message, head[0])
            text = text[head[1] :]
        if not self._arguments.done:
            text = self._arguments.read(text)
            if not self._arguments.done:
                return ""
        self._tail += text
        end = self._span.end(self._tail)
        if end is None:
            return ""
        self.done = True
        return self._tail[end:]


class ArgumentsReader:
    """Adds a call to a message, and then its arguments as they arrive.

    Args:
        message: receives the call.
        name: the name of the function; None if the call was begun before.

    Attributes:
        done: whether the end of the arguments was read.
    """

    def __init__(self, message: ParsedMessage, name: str | None) -> None:
        self.done = False
        self._message, self._span, self._text = message, JsonSpan(), ""
        if name is not None:
            message.call(name, "")

    @property
    def in_text(self) -> bool:
        """Whether a tag would be part of a text."""
        return self._span.in_text

    def read(self, text: str, *, final: bool = False) -> str:
        """Read the next text, and return what follows the arguments; the first text begins with a bracket."""
        before = len(self._text)
        self._text += text
        end = self._span.end(self._text)
        self._message.continue_call(self._text[before:end])
        if end is None:
            return ""
        self.done = True
        return self._text[end:]
