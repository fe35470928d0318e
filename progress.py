"""Callbacks for the progress of long work. This module imports nothing, so every folder may use it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback for long work, in any unit: bytes, tokens, layers, runs."""

    def __call__(self, done: int, total: int, name: str, /) -> None:
        """Report that ``done`` of ``total`` is finished; ``name`` is the phase, or the last item."""


def silence(done: int, total: int, name: str, /) -> None:
    """Ignore the progress."""


def phase(progress: Progress | None, name: str) -> Progress:
    """Return a callback that calls ``progress`` with the name of a phase, such as ``calibrate``."""
    if progress is None:
        return silence
    told = progress

    def tell(done: int, total: int, _: str, /) -> None:
        told(done, total, name)

    return tell
