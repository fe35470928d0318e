"""Parser of the tool calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

See https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from .base import Message, MessageParser
from .call_reader import CallReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MessageParser):
    """Parses calls between tags; the closing tag of the last call may be missing."""

    marker = _OPEN
    needs_special_tokens = False

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self._called = False  # an opening tag was read, but not its closing tag
        self._reader: CallReader | None = None

    def _advance(self, *, final: bool) -> bool:
        if not self._called:
            text, marker = self._until(_OPEN, final=final)
            self.message.content.add(text)
            self._called = bool(marker)
            return self._called
        if self._reader is None and CallReader.begins(self._text):
            self._reader = CallReader(self.message)
        if self._reader is None and _CLOSE not in self._text and not final:
            return False
        text, marker = self._until(_CLOSE, final=final)
        if self._reader is not None:
            if not self._reader.done:
                self._reader.read(text)
        elif not self.message.call_json(text):
            self.message.content.add(_OPEN + text + marker)
        if marker or final:
            self._called, self._reader = False, None
        return bool(marker)
