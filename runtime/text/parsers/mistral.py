"""Parser of the tool calls of Mistral, which follow ``[TOOL_CALLS]``.

A list, ``[{"name": ..., "arguments": {...}}, ...]``, or, since tokenizer version 11, one call per marker:
``name[ARGS]{...}``. See https://github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import re

from .base import Message, MessageParser, is_json
from .json_span import JsonSpan

_MARKER = "[TOOL_CALLS]"
_OPENING = re.compile(r"(^\[\s*)?\{")
_CONTROL = re.compile(r"\[CALL_ID\]\w*|\[ARGS\]")


class MistralParser(MessageParser):
    """Parses content, then calls."""

    marker = _MARKER

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self._called = False  # a marker was read, but not its calls
        self._begin: int | None = None  # start of the JSON text
        self._span = JsonSpan()

    def _advance(self, *, final: bool) -> bool:
        if not self._called:
            text, marker = self._until(_MARKER, final=final)
            self.message.content.add(text)
            self._called = bool(marker)
            return self._called
        if self._begin is None:
            self._text = self._text.lstrip()
            opening = _OPENING.search(self._text)
            self._begin = opening.start() if opening else None
        end = None
        if self._begin is not None:
            found = self._span.end(self._text[self._begin :])
            end = None if found is None else self._begin + found
        if end is None and not final:
            return False
        self._take(self._text[:end])
        return bool(self._text)

    def _take(self, call: str) -> None:
        name, arguments = call[: self._begin], call[self._begin :] if self._begin else call
        name = _CONTROL.sub("", name).strip()
        if self._begin and name and is_json(arguments):
            self.message.call(name, arguments)
        elif not self.message.call_json(call):
            self.message.content.add(_MARKER + call)
        self._text = self._text[len(call) :]
        self._called, self._begin, self._span = False, None, JsonSpan()
