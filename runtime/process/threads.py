"""Whether more threads can be started."""

from __future__ import annotations

import threading


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
