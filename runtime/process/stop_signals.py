"""The signals that stop a process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def stop_signals() -> list[signal.Signals]:
    """Return SIGINT and SIGTERM without those that are ignored.

    A shell starts the background jobs of a script with SIGINT ignored, so that Ctrl-C ends the script alone.
    """
    return [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Let SIGINT end the process at once within the block, without a traceback, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if signal.SIGINT in stop_signals():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
