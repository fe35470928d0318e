"""Progress on stderr: a bar on a terminal, a few plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress as bars
from rich.console import Console

Report = Callable[[int, int], None]  # (done, total), in any unit

FIRST_LINE_SECONDS = 2.0
NEXT_LINE_SECONDS = 10.0


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Report]:
    """Show how far a piece of work is; yields the function that the work calls."""
    console = Console(stderr=True)
    if quiet:
        yield lambda done, total: None
    elif console.is_terminal:
        columns = (
            bars.TextColumn("{task.description:<10}"),
            bars.BarColumn(bar_width=40),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
        )
        with bars.Progress(*columns, console=console) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _PlainLines(label)


class _PlainLines:
    """Writes a line now and then, the first one only if the work takes long."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._next = time.monotonic() + FIRST_LINE_SECONDS
        self._console = Console(stderr=True)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_LINE_SECONDS
            self._console.print(f"{self._label}: {100 * done // max(total, 1)} %")
