"""Parser of the tool calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

See https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from .base import Message, MessageParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(MessageParser):
    """Parses calls between tags; the closing tag of the last call may be missing."""

    marker = _OPEN
    needs_special_tokens = False

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self._call: str | None = None

    def _advance(self, *, final: bool) -> bool:
        if self._call is None:
            text, marker = self._until(_OPEN, final=final)
            self.message.content.add(text)
            self._call = "" if marker else None
            return bool(marker)
        text, marker = self._until(_CLOSE, final=final)
        self._call += text
        if marker or final:
            if not self.message.call_json(self._call):
                self.message.content.add(_OPEN + self._call + marker)
            self._call = None
        return bool(marker)
