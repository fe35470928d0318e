"""Parser of the tool calls of Mistral, which follow ``[TOOL_CALLS]``.

A list, ``[{"name": ..., "arguments": {...}}, ...]``, or, since tokenizer version 11, one call per marker:
``name[ARGS]{...}``. See https://github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import re

from .base import Message, MessageParser
from .call_reader import ArgumentsReader, CallReader
from .json_span import JsonSpan

_MARKER = "[TOOL_CALLS]"
_OPENING = re.compile(r"(^\[\s*)?\{")
_LIST = re.compile(r"\[\s*")
_BETWEEN = " \t\r\n,"
_CONTROL = re.compile(r"\[CALL_ID\]\w*|\[ARGS\]")


class MistralParser(MessageParser):
    """Parses content, then calls."""

    marker = _MARKER

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self._called = False  # a marker was read, but not its calls
        self._listed = False  # within a list whose first call has begun
        self._reader: CallReader | ArgumentsReader | None = None

    def _advance(self, *, final: bool) -> bool:
        if self._reader is not None:
            self._text = self._reader.read(self._text)
            if self._reader.done:
                self._reader = None
            return bool(self._text)
        if self._listed:
            return self._next_of_list(final=final)
        if not self._called:
            text, marker = self._until(_MARKER, final=final)
            self.message.content.add(text)
            self._called = bool(marker)
            return self._called
        self._text = self._text.lstrip()
        return self._begin() or self._whole(final=final)

    def _begin(self) -> bool:
        """Begin a call whose arguments have begun; return False if there is none."""
        if (brackets := _LIST.match(self._text)) and CallReader.begins(self._text[brackets.end() :]):
            self._text = self._text[brackets.end() :]
            self._reader, self._listed = CallReader(self.message), True
        else:
            at = self._text.find("{")
            name = _CONTROL.sub("", self._text[: max(at, 0)]).strip()
            if not name or name.startswith("["):
                return False
            self._text = self._text[at:]
            self._reader = ArgumentsReader(self.message, name)
        self._called = False
        return True

    def _next_of_list(self, *, final: bool) -> bool:
        self._text = self._text.lstrip(_BETWEEN)
        if CallReader.begins(self._text):
            self._reader = CallReader(self.message)
            return True
        if not self._text.startswith("{"):
            self._listed = not self._text
            self._text = self._text.removeprefix("]")
            return bool(self._text)
        end = JsonSpan().end(self._text)
        if end is None and not final:
            return False
        call, self._text = self._text[:end], self._text[len(self._text[:end]) :]
        if not self.message.call_json(call):
            self.message.content.add(call)
        return bool(self._text)

    def _whole(self, *, final: bool) -> bool:
        """Parse calls in another form when they are complete."""
        opening = _OPENING.search(self._text)
        end = None
        if opening is not None:
            found = JsonSpan().end(self._text[opening.start() :])
            end = None if found is None else opening.start() + found
        if end is None and not final:
            return False
        call, self._text = self._text[:end], self._text[len(self._text[:end]) :]
        if not self.message.call_json(call):
            self.message.content.add(_MARKER + call)
        self._called = False
        return bool(self._text)
