"""Stop strings, found wherever token borders fall, in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for the first of several strings to be completed.

    Text that may be the beginning of a stop string is held back until that is decided. How the text is cut
    into pieces changes nothing.

    Args:
        strings: what to look for; may be empty.
        include: leave the stop string at the end of the text.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def push(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            text: the next piece.
            check: False lets it pass unseen, along with what was held.

        Returns:
            The text that may be given out, and the stop string that ended it.
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
        """Return what is held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """End and string of the occurrence completed first; of several, the longest."""
        found = [(at + len(stop), stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` with which ``stop`` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
