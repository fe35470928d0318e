"""Progress on stderr with the time that is left: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ..progress import Progress, silence

if TYPE_CHECKING:
    import rich.progress as bars

FIRST_LINE_SECONDS = 2.0
NEXT_LINE_SECONDS = 10.0
LONG_SECONDS = 600.0
_SURE_SECONDS = 10.0  # of work, after which the time that is left is said to be long
PREPARE = "prepare (the first time only)"  # loading a model: shown only where the cache does not hold it
# By phase, what is quicker where it would take longer than ``LONG_SECONDS``.
_QUICKER = {"calibrate": "methods that end in -fast read no text and take a fraction of it"}


def duration(seconds: float) -> str:
    """Return seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show the progress of work while it runs.

    Yields:
        The callback for the work.
    """
    if quiet:
        yield silence
        return
    shown = _Shown(label)
    try:
        yield shown
        shown.fill()
    finally:
        shown.stop()


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


class _Shown:
    """A bar or lines from the first call on: cached work shows nothing, and does not import rich.

    Work with another total is the next step, which is shown as such. Within a step the share never falls,
    though threads may report out of order.
    """

    def __init__(self, label: str) -> None:
        self._label, self._begun = label, time.monotonic()
        self._quicker = _QUICKER.get(label, "")
        self._remaining = _Remaining(0, 0)
        self._shown: _Bar | _PlainLines | None = None
        self._done, self._total, self._step = 0, -1, 0

    def __call__(self, done: int, total: int, name: str, /) -> None:
        if self._shown is None or total != self._total:
            self.fill()
            self.stop()
            self._done, self._total, self._step = 0, total, self._step + 1
            label = self._label + (f", step {self._step}" if self._step > 1 else "")
            self._shown = _bar(label) or _PlainLines(label, self._begun)
            self._remaining = _Remaining(done, total)
        self._done = max(done, self._done)
        left = self._remaining(self._done)
        self._shown(self._done, total, left)
        if self._quicker and self._remaining.is_long:
            self._shown.say(f"{self._label}: about {duration(left or 0.0)} left; {self._quicker}")
            self._quicker = ""

    def fill(self) -> None:
        """Show the work as complete; the last small steps may not have been reported."""
        if self._shown is not None:
            self._shown.fill()

    def stop(self) -> None:
        """Stop the bar."""
        if isinstance(self._shown, _Bar):
            self._shown.stop()


class _Remaining:
    """The seconds that a step still takes, by the pace since its first report.

    Attributes:
        is_long: whether it takes longer than ``LONG_SECONDS``, as far as can be told.
    """

    def __init__(self, done: int, total: int) -> None:
        self._begun, self._first, self._total = time.monotonic(), done, total
        self.is_long = False

    def __call__(self, done: int) -> float | None:
        """Return the seconds; None before anything was done."""
        elapsed, steps = time.monotonic() - self._begun, done - self._first
        if steps <= 0:
            return None
        left = elapsed / steps * (self._total - done)
        self.is_long = elapsed >= _SURE_SECONDS and left > LONG_SECONDS
        return left


def _bar(label: str) -> _Bar | None:
    """Start a bar, if stderr is a terminal."""
    import rich.progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (
        bars.TextColumn("{task.description:<9}"),
        bars.BarColumn(bar_width=40),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    return _Bar(bars.Progress(*columns, console=console), label)


class _Bar:
    def __init__(self, bar: bars.Progress, label: str) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=None)
        self._total: int | None = None
        bar.start()

    def __call__(self, done: int, total: int, left: float | None) -> None:
        self._total = total
        self._bar.update(self._task, completed=done, total=total)

    def say(self, text: str) -> None:
        self._bar.console.print(text)

    def fill(self) -> None:
        if self._total is not None:
            self._bar.update(self._task, completed=self._total)

    def stop(self) -> None:
        self._bar.stop()


class _PlainLines:
    """Prints a line after 2 s, and then every 10 s, with the time that is left."""

    def __init__(self, label: str, begun: float) -> None:
        self._label = label
        self._next = begun + FIRST_LINE_SECONDS
        self._share: int | None = None  # of the last line

    def __call__(self, done: int, total: int, left: float | None) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NEXT_LINE_SECONDS
            until = "" if left is None or done >= total else f", about {duration(left)} left"
            self._share = 100 * done // max(total, 1)
            self.say(f"{self._label}: {self._share} %{until}")

    def fill(self) -> None:
        """Print the whole, where a line has told of a part."""
        if self._share is not None and self._share < 100:
            self._share = 100
            self.say(f"{self._label}: 100 %")

    def say(self, text: str) -> None:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True).print(text)
