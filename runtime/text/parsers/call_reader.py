"""Read a tool call, a JSON object, while it arrives, so that its arguments can be passed on in pieces."""

from __future__ import annotations

import re

from .base import Message
from .json_span import JsonSpan

# The usual form only; any other object is parsed when it is complete.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[\w./:-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class CallReader:
    """Reads one object ``{"name": ..., "arguments": {...}}``.

    A call exists once its arguments have begun. If the text ends too early, they are incomplete.

    Args:
        message: receives the call.

    Attributes:
        done: whether the end of the object was read.
    """

    def __init__(self, message: Message) -> None:
        self.done = False
        self._message = message
        self._arguments: ArgumentsReader | None = None
        self._tail = ""
        self._span = JsonSpan(depth=1)  # of what follows the arguments

    @staticmethod
    def begins(text: str) -> bool:
        """Return whether a text begins with a call up to its arguments."""
        return _HEAD.match(text) is not None

    def read(self, text: str) -> str:
        """Read the next text, and return what follows the object. The first text must begin the call."""
        if self._arguments is None:
            head = _HEAD.match(text)
            if head is None:
                raise ValueError("the text does not begin a call")
            self._arguments = ArgumentsReader(self._message, head["name"])
            text = text[head.end() :]
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
        name: the name of the function.

    Attributes:
        done: whether the end of the arguments was read.
    """

    def __init__(self, message: Message, name: str) -> None:
        self.done = False
        self._message, self._span, self._text = message, JsonSpan(), ""
        message.call(name, "")

    def read(self, text: str) -> str:
        """Read the next text, and return what follows the arguments; the first text begins with a bracket."""
        before = len(self._text)
        self._text += text
        end = self._span.end(self._text)
        self._message.continue_call(self._text[before:end])
        if end is None:
            return ""
        self.done = True
        return self._text[end:]
