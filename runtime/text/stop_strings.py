"""Find stop strings in text that arrives in pieces, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Find the first completed stop string in a text.

    Text that may be the start of a stop string is held back until that is decided. The result does not depend
    on how the text is cut into pieces.

    Args:
        strings: the stop strings; may be empty.
        include: keep the stop string at the end of the text.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            text: the next piece.
            check: False returns the held and the new text without a search.

        Returns:
            The text that is final, and the stop string that ended it, if any.
        """
        text = self._held + text
        self._held = ""
        if not check or not self._strings:
            return text, None
        found = self._first(text)
        if found is not None:
            end, stop = found
            return text[: end if self._include else end - len(stop)], stop
        held = max(overlap(text, stop) for stop in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def end(self) -> str:
        """Return the held text: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the end and the string of the first completed occurrence; of several, the longest string."""
        found = [(at + len(stop), stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
