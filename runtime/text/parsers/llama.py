"""Parser of the tool calls of Llama 3: the message is one or more ``{"name": ..., "parameters": {...}}``.

``<|python_tag|>`` may precede them. See https://github.com/meta-llama/llama-models (prompt format of 3.1).
"""

from __future__ import annotations

from .base import Message, MessageParser
from .call_reader import CallReader
from .json_span import JsonSpan

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class LlamaParser(MessageParser):
    """Parses a message that starts with an object as calls separated by semicolons, others as content."""

    marker = _TAG

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self._calls = True  # whether the message had only calls so far
        self._span = JsonSpan()
        self._reader: CallReader | None = None

    def _advance(self, *, final: bool) -> bool:
        if not self._calls:
            text, marker = self._until(_TAG, final=final)
            self.message.content.add(text)
            self._calls = bool(marker)
            return self._calls
        if self._reader is not None or CallReader.begins(self._text):
            self._reader = self._reader or CallReader(self.message)
            self._text = self._reader.read(self._text)
            if self._reader.done:
                self._reader, self._span = None, JsonSpan()
            return bool(self._text)
        if not self._text.startswith("{"):
            return self._skip(final=final)
        end = self._span.end(self._text)
        if end is None and not final:
            return False
        call, self._span = self._text[:end], JsonSpan()
        self._calls = self.message.call_json(call)
        if self._calls:
            self._text = self._text[len(call) :]
        return bool(self._text)

    def _skip(self, *, final: bool) -> bool:
        """Skip separators between calls; any other text starts content."""
        self._text = self._text.lstrip(_BETWEEN if self.message.tool_calls else None)
        if self._text.startswith(_TAG):
            self._text = self._text[len(_TAG) :]
            return True
        if not self._text or (_TAG.startswith(self._text) and not final):
            return False
        self._calls = self._text.startswith("{")
        return True
