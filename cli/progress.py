"""Progress on stderr: a bar on a terminal, a few plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.progress as bars
from rich.console import Console

FIRST_LINE_SECONDS = 2.0
NEXT_LINE_SECONDS = 10.0


class Progress(Protocol):
    """What a piece of work calls to tell how far it is, in any unit."""

    def __call__(self, done: int, total: int, name: str = "") -> None:
        """``done`` of ``total``; ``name`` is what was worked on last."""


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show how far a piece of work is, while it runs.

    Yields:
        The function that the work calls.
    """
    console = Console(stderr=True)
    if quiet:
        yield _Silence()
    elif not console.is_terminal:
        yield _PlainLines(label)
    else:
        columns = (
            bars.TextColumn("{task.description:<9}"),
            bars.BarColumn(bar_width=40),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
        )
        bar = _Bar(bars.Progress(*columns, console=console), label)
        try:
            yield bar
            bar.fill()
        finally:
            bar.stop()


class _Silence:
    def __call__(self, done: int, total: int, name: str = "") -> None:
        pass


class _Bar:
    """Appears with the first report, so that work found in the cache shows nothing."""

    def __init__(self, bar: bars.Progress, label: str) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=None)
        self._total: int | None = None

    def __call__(self, done: int, total: int, name: str = "") -> None:
        self._total = total
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def fill(self) -> None:
        """Show all as done: what is too small to be reported is done too."""
        if self._total is not None:
            self._bar.update(self._task, completed=self._total)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


class _PlainLines:
    """Writes a line now and then, the first one only if the work takes long."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._next = time.monotonic() + FIRST_LINE_SECONDS

    def __call__(self, done: int, total: int, name: str = "") -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_LINE_SECONDS
            Console(stderr=True).print(f"{self._label}: {100 * done // max(total, 1)} %")
