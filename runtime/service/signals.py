"""Signals of a service: SIGTERM and SIGINT stop it, SIGHUP reloads its settings."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..process.stop_signals import stop_signals


@contextmanager
def stop_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; then restore the previous signal handlers.

    A signal that is ignored stays so.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in stop_signals()}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        loop.call_soon_threadsafe(stop.set)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


@contextmanager
def on_hangup(work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` in the event loop at each SIGHUP. Windows has no such signal."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(work)

    before = signal.signal(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
