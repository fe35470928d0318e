"""Run long work in a thread, so that the event loop is not blocked."""

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
