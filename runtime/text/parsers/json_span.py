"""Find the end of a JSON object or list that arrives in pieces."""

from __future__ import annotations

import re

_SIGNIFICANT = re.compile(r'["\\{}\[\]]')
_ESCAPE = re.compile(r"\\.|\"", re.DOTALL)


class JsonSpan:
    """Counts brackets outside of strings.

    Args:
        depth: brackets that are open before the text; with 0 the text must start with an opening bracket.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._at = 0
        self._in_string = False

    @property
    def in_text(self) -> bool:
        """Whether the text read so far ends within a string."""
        return self._in_string

    def end(self, text: str) -> int | None:
        """Return the end of the value in ``text``, None if it is incomplete; ``text`` must only grow."""
        while True:
            pattern = _ESCAPE if self._in_string else _SIGNIFICANT
            match = pattern.search(text, self._at)
            if match is None:
                # A backslash at the very end belongs to what comes next, unless the one before it took it.
                self._at = max(self._at, len(text) - (self._in_string and text.endswith("\\")))
                return None
            self._at = match.end()
            match match.group():
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= 0:
                        return self._at
