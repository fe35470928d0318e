"""Special tokens in the text of a conversation: they stay text, so that no document can write a turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_Tree = dict[str, "_Tree"]
_END = ""
_LONGEST = 64  # characters that tell a text; the tree is walked recursively


def _any(tree: _Tree) -> str:
    """Return a regular expression of the texts of a tree by characters.

    An alternation of thousands of texts, as some tokenizers have, would try each at every character. A text
    that begins with another one is left out, since what begins it is found.
    """
    if _END in tree:
        return ""
    branches = [re.escape(character) + _any(rest) for character, rest in tree.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class SpecialTexts:
    """Keeps the texts of special tokens apart from the tokens themselves.

    A template writes both: its own markers, and the messages between them. In the messages, each text of a
    special token gets a mark behind its first character, and the rendered text is cut at the marks. No piece
    then holds such a text, except where the template wrote it.

    Args:
        texts: the texts of the special tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        tree: _Tree = {}
        for text in texts:
            node = tree
            for character in text[:_LONGEST] if len(text) > 1 else "":  # one character cannot be cut
                node = node.setdefault(character, {})
            if text:
                node[_END] = {}
        # The rest is looked at only, so that texts that overlap are found too.
        firsts = [f"{re.escape(first)}(?={_any(rest)})" for first, rest in tree.items() if first != _END]
        self._pattern = re.compile("|".join(firsts)) if firsts else None

    def hold(self, text: str) -> bool:
        """Return whether a text has the text of a special token."""
        return self._pattern is not None and self._pattern.search(text) is not None

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
        marked_messages = [marker.message(message) for message in messages]
        marked_tools = None if tools is None else [marker.value(tool) for tool in tools]
        marked_variables = {name: marker.value(value) for name, value in variables.items()}
        return (
            (marked_messages, marked_tools, marked_variables, mark)
            if marker.marks
            else (messages, tools, variables, "")
        )


class _Marker:
    def __init__(self, pattern: re.Pattern[str], mark: str) -> None:
        self._pattern, self._put, self.marks = pattern, rf"\g<0>{mark}", False

    def message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        role = message.get("role")  # a caller's value: comparing it may not give a truth value
        is_answer = isinstance(role, str) and role == "assistant"
        unmarked = ("content", "reasoning_content") if is_answer else ()
        return {name: value if name in unmarked else self.value(value) for name, value in message.items()}

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            put, count = self._pattern.subn(self._put, value)
            self.marks = self.marks or count > 0
            return put
        if isinstance(value, Mapping):
            return {self.value(name): self.value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
