"""Special tokens in the text of a conversation: they stay text, so that no document can write a turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class SpecialTexts:
    """Keeps the texts of special tokens apart from the tokens themselves.

    A template writes both: its own markers, and the messages between them. In the messages, each text of a
    special token gets a mark behind its first character, and the rendered text is cut at the marks. No piece
    then holds such a text, except where the template wrote it.

    Args:
        texts: the texts of the special tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        # One character cannot be cut. The look-ahead finds texts that overlap.
        known = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._pattern = (
            re.compile(f"(?=(?:{'|'.join(map(re.escape, known))}))(.)", re.DOTALL) if known else None
        )

    def marked(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Any] | None, Mapping[str, Any], str]:
        """Return messages, tools and variables with marks, and the mark; it is empty if there are none.

        The text and the thoughts of the assistant are its own: they may hold what its template reads.
        """
        if self._pattern is None:
            return messages, tools, variables, ""
        mark = str(secrets.randbelow(9 * 10**23) + 10**23)  # digits pass every filter of a template
        marker = _Marker(self._pattern, mark)
        told = [marker.message(message) for message in messages]
        offered = None if tools is None else [marker.value(tool) for tool in tools]
        given = {name: marker.value(value) for name, value in variables.items()}
        return (told, offered, given, mark) if marker.found else (messages, tools, variables, "")


class _Marker:
    def __init__(self, pattern: re.Pattern[str], mark: str) -> None:
        self._pattern, self._put, self.found = pattern, rf"\g<1>{mark}", False

    def message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        own = ("content", "reasoning_content") if message.get("role") == "assistant" else ()
        return {name: value if name in own else self.value(value) for name, value in message.items()}

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            put, count = self._pattern.subn(self._put, value)
            self.found = self.found or count > 0
            return put
        if isinstance(value, Mapping):
            return {self.value(name): self.value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
