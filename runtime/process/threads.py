"""Threads that a process does not wait for at its end, and whether more can be started."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from .at_exit import LOADING

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread. Unlike an executor's thread, it does not delay the process exit."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name=LOADING, daemon=True).start()
    return asyncio.wrap_future(outcome)


def check_new_threads(count: int) -> None:
    """Start ``count`` threads at once and end them; call it before a library that hangs if it cannot.

    Raises:
        RuntimeError: the limit of threads or of memory is reached.
    """
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()
