"""How often the threads of a service take turns at Python's global lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 0.0005


@contextmanager
def quick_turns() -> Iterator[None]:
    """Let a thread wait at most 0.5 ms for Python's global lock, instead of 5 ms, until the end.

    An event loop gives the lock up each time it waits for a socket, several times a request, and the engine's
    thread may hold it then. Each wait delays the first token.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
