"""Threads that a process does not wait for at its end or that let others go first; whether more can start."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .at_exit import LOADING

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
# Of Linux's nice values: a thread gets a third of the time of one without it, where both want a core.
_LESS_PRIORITY = 5
_works, _lock = [0, 0], threading.Lock()


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread. Unlike an executor's thread, it does not delay the process exit."""
    import asyncio  # 20 ms, which a program without a loop of events does without

    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name=LOADING, daemon=True).start()
    return asyncio.wrap_future(outcome)


def at_lower_priority(work: Callable[[], T]) -> T:
    """Run ``work`` in a daemon thread that other threads of the process go before, and wait for its result.

    Threads that it starts, such as those of a session's pool, inherit the priority. On Linux alone: other
    systems have none for a single thread that others inherit.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        with _lock:
            _works[0] += 1
        try:
            if sys.platform == "linux":
                thread = threading.get_native_id()
                os.setpriority(
                    os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _LESS_PRIORITY
                )
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is awaited
            outcome.set_exception(error)
        finally:
            with _lock:
                _works[1] += 1

    threading.Thread(target=run, name="low-priority", daemon=True).start()
    return outcome.result()


def works_at_lower_priority() -> tuple[int, int]:
    """Return how many works of ``at_lower_priority`` have begun, and how many of them have ended."""
    with _lock:
        return _works[0], _works[1]


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
