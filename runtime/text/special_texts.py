"""Special tokens in the text of a conversation: they stay text, so that no document can write a turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_LONGEST = 64  # characters that tell a text


class SpecialTexts:
    """Keeps the texts of special tokens apart from the tokens themselves.

    A template writes both: its own markers, and the messages between them. In the messages, each text of a
    special token gets a mark behind its first character, and the rendered text is cut at the marks. No piece
    then holds such a text, except where the template wrote it.

    Args:
        texts: the texts of the special tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        # Sets, not an expression of all texts: compiling that of a vocabulary with 6,000 takes 0.4 s.
        self._texts = {text[:_LONGEST] for text in texts if len(text) > 1}  # one character cannot be cut
        self._pairs = {text[:2] for text in self._texts}
        self._lengths = sorted({len(text) for text in self._texts})
        firsts = "".join(sorted({re.escape(pair[0]) for pair in self._pairs}))
        self._firsts = re.compile(f"[{firsts}]") if firsts else None

    def hold(self, text: str) -> bool:
        """Return whether a text has the text of a special token."""
        return self._firsts is not None and any(
            self._begins(text, match.start()) for match in self._firsts.finditer(text)
        )

    def with_marks(self, text: str, mark: str) -> str:
        """Return a text with a mark behind the first character of each text of a special token in it."""
        if self._firsts is None:
            return text
        return self._firsts.sub(
            lambda match: match[0] + (mark if self._begins(text, match.start()) else ""), text
        )

    def _begins(self, text: str, start: int) -> bool:
        """Return whether the text of a special token begins at a position; texts may overlap."""
        return text[start : start + 2] in self._pairs and any(
            text[start : start + length] in self._texts for length in self._lengths
        )

    def marked(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Any] | None, Mapping[str, Any], str]:
        """Return messages, tools and variables with marks, and the mark; it is empty if there are none.

        The text and the thoughts of the assistant are its own: they may hold what its template reads.
        """
        if self._firsts is None:
            return messages, tools, variables, ""
        mark = str(secrets.randbelow(9 * 10**23) + 10**23)  # digits pass every filter of a template
        marker = _Marker(self, mark)
        marked_messages = [marker.message(message) for message in messages]
        marked_tools = None if tools is None else [marker.value(tool) for tool in tools]
        marked_variables = {name: marker.value(value) for name, value in variables.items()}
        return (
            (marked_messages, marked_tools, marked_variables, mark)
            if marker.marks
            else (messages, tools, variables, "")
        )


class _Marker:
    def __init__(self, texts: SpecialTexts, mark: str) -> None:
        self._texts, self._mark, self.marks = texts, mark, False

    def message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        role = message.get("role")  # a caller's value: comparing it may not give a truth value
        is_answer = isinstance(role, str) and role == "assistant"
        unmarked = ("content", "reasoning_content") if is_answer else ()
        return {name: value if name in unmarked else self.value(value) for name, value in message.items()}

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            marked = self._texts.with_marks(value, self._mark)
            self.marks = self.marks or len(marked) > len(value)
            return marked
        if isinstance(value, Mapping):
            return {self.value(name): self.value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
