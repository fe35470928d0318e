"""The signals that stop a process, and blocks that delay Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGACTION_BYTES = 256  # more than any libc's struct sigaction has


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT until the end of the block, so that the block runs as a whole.

    Python may raise KeyboardInterrupt between any two operations of the main thread, which would leave
    scheduler and slots inconsistent. In other threads, and without a Python signal handler, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[-1])


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


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Put the handler of SIGTERM back that a library replaces; unlike ``signal.signal``, in any thread.

    Where there is no ``sigaction`` (Windows), nothing is done.
    """
    sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None
    if sigaction is None:
        yield
        return
    handler = ctypes.create_string_buffer(_SIGACTION_BYTES)
    sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, handler, None)
