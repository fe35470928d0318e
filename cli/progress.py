"""Progress on stderr: a bar on a terminal, plain lines otherwise, nothing with --quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import rich.progress as bars
from rich.console import Console

from ..progress import Progress, silence

FIRST_LINE_SECONDS = 2.0
NEXT_LINE_SECONDS = 10.0


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show the progress of work while it runs.

    Yields:
        The callback for the work.
    """
    console = Console(stderr=True)
    if quiet:
        yield silence
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


@contextmanager
def phases(*, quiet: bool = False) -> Iterator[Progress]:
    """Show the progress of work in several phases, one bar for each.

    Yields:
        The callback for the work, whose ``name`` is the phase.
    """
    with ExitStack() as bars_:
        yield _Phases(bars_, quiet)


class _Phases:
    def __init__(self, stack: ExitStack, quiet: bool) -> None:
        self._stack = stack
        self._quiet = quiet
        self._phase: str | None = None
        self._tell: Progress = silence

    def __call__(self, done: int, total: int, name: str, /) -> None:
        if name != self._phase:
            self._stack.close()  # ends the previous phase
            self._phase = name
            self._tell = self._stack.enter_context(progress(name, quiet=self._quiet))
        self._tell(done, total, "")


class _Bar:
    """A bar that appears at the first call, so that cached work shows nothing."""

    def __init__(self, bar: bars.Progress, label: str) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=None)
        self._total: int | None = None

    def __call__(self, done: int, total: int, name: str, /) -> None:
        self._total = total
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def fill(self) -> None:
        """Show the work as complete; the last small steps may not have been reported."""
        if self._total is not None:
            self._bar.update(self._task, completed=self._total)

    def stop(self) -> None:
        """Stop the bar."""
        self._bar.stop()


class _PlainLines:
    """Prints a line after 2 s, and then every 10 s."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._next = time.monotonic() + FIRST_LINE_SECONDS

    def __call__(self, done: int, total: int, name: str, /) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_LINE_SECONDS
            Console(stderr=True).print(f"{self._label}: {100 * done // max(total, 1)} %")
