"""Parser of reasoning between tags before the answer, as DeepSeek, Qwen and Magistral write it."""

from __future__ import annotations

from .base import MessageParser

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class ThinkParser(MessageParser):
    """Parses reasoning up to its closing tag, and passes the rest to another parser.

    Args:
        answer: parses the rest into the same message.
        tags: the opening and the closing tag.
        opened: whether the prompt ends with the opening tag.
    """

    def __init__(self, answer: MessageParser, tags: tuple[str, str], *, opened: bool) -> None:
        super().__init__(answer.message)
        self._answer = answer
        self._open, self._close = tags
        self._state = "reasoning" if opened else "before"

    def end(self) -> None:
        """Parse the rest: no more text follows."""
        super().end()
        self._answer.end()

    def _advance(self, *, final: bool) -> bool:
        if self._state == "before":
            return self._begin(final=final)
        if self._state == "reasoning":
            text, marker = self._until(self._close, final=final)
            self.message.reasoning.add(text)
            self._state = "answer" if marker else "reasoning"
            return bool(marker)
        self._answer.push(self._text)
        self._text = ""
        return False

    def _begin(self, *, final: bool) -> bool:
        text = self._text.lstrip()
        if self._open.startswith(text) and len(text) < len(self._open) and not final:
            return False
        opened = text.startswith(self._open)
        self._text = text[len(self._open) :] if opened else self._text
        self._state = "reasoning" if opened else "answer"
        return True
