"""Stop strings, found wherever token borders fall, in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches a text for the first of several strings to be completed. The work is linear in the text.

    Text that may be the beginning of a stop string is held back until that is decided. How the text is cut
    into pieces changes nothing.

    Args:
        strings: what to look for; may be empty.
        include: leave the stop string at the end of the text.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._searches = [_Search(string) for string in strings]
        self._first = {string[0] for string in strings}
        self._include = include
        self._held = deque[str]()
        self._num_held = 0

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            text: the next piece.
            check: False lets it pass unseen, along with what was held.

        Returns:
            The text that may be given out, and the stop string that ended it.
        """
        if not check:
            for search in self._searches:
                search.matched = 0
            return self.end() + text, None
        if not self._num_held and self._first.isdisjoint(text):
            return text, None
        for end, character in enumerate(text, 1):
            for search in self._searches:
                search.step(character)
            found = [search.string for search in self._searches if search.matched == len(search.string)]
            if found:
                stop = max(found, key=len)
                self._hold(text[:end])
                return self._release(0 if self._include else len(stop)), stop
        self._hold(text)
        return self._release(max(search.matched for search in self._searches)), None

    def end(self) -> str:
        """Return what is held back: no more text will come."""
        return self._release(0)

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _release(self, kept: int) -> str:
        """Give out all but the last ``kept`` characters."""
        parts: list[str] = []
        while self._held and self._num_held - len(self._held[0]) >= kept:
            parts.append(self._held.popleft())
            self._num_held -= len(parts[-1])
        if rest := self._num_held - kept:
            parts.append(self._held[0][:rest])
            self._held[0] = self._held[0][rest:]
            self._num_held -= rest
        return "".join(parts)


class _Search:
    """How much of a string a text ends with (Knuth, Morris and Pratt, SIAM J. Comput. 6, 1977).

    Args:
        string: not empty.

    Attributes:
        matched: the length of the longest end of the text with which the string begins.
    """

    __slots__ = ("_shorter", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self._shorter = [0]  # of each beginning: the longest other beginning that it ends with
        self.matched = 0
        for character in string[1:]:
            self.step(character)
            self._shorter.append(self.matched)
        self.matched = 0

    def step(self, character: str) -> None:
        """Go on with the text's next character."""
        string, matched = self.string, self.matched
        while matched and (matched == len(string) or string[matched] != character):
            matched = self._shorter[matched - 1]
        self.matched = matched + (string[matched] == character)
