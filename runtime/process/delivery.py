"""Tell readers in an event loop that a thread has news for them, with few wake-ups of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

R = TypeVar("R")

# Reading news takes at most this share of the time of an event loop, unless news would become older than
# ``_LONGEST_REST`` seconds. Rests below ``_SHORTEST_REST`` seconds would cost more than they save.
_SHARE = 0.05
_LONGEST_REST = 0.025
_SHORTEST_REST = 0.001


class Delivery(Generic[R]):
    """Tells several readers of an event loop that there is news, and wakes the loop once for all of them.

    After the readers ran, the loop rests: news that arrives meanwhile waits, and is read together. The rest
    is in proportion to the time that the readers took, so that they take at most ``_SHARE`` of the time: few
    readers of a slow model get each token at once, many readers of a fast model get several tokens in one.
    Urgent news comes before the other, and does not wait for the end of the rest; the other does.

    Args:
        loop: the event loop of the readers.
        tell: tells a reader; called in the loop. The reader goes on in a later call of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[R], None]) -> None:
        self._loop, self._tell = loop, tell
        self._lock = threading.Lock()
        # Dicts without values: sets that keep the order. Guarded by _lock, as are the next three.
        self._told: dict[R, None] = {}
        self._urgent: dict[R, None] = {}
        self._called = False  # whether the loop will run ``_flush``
        self._resting = False

    def post(self, readers: Iterable[R], urgent: Iterable[R] = ()) -> None:
        """Note that readers have news; called in any thread.

        Args:
            readers: the readers whose news can wait.
            urgent: the readers whose news is urgent.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:
            self._told.update(dict.fromkeys(readers))
            hurried = dict.fromkeys(urgent)
            self._told = {reader: None for reader in self._told if reader not in hurried}
            self._urgent.update(hurried)
            wake = not self._called and (bool(hurried) or not self._resting)
            self._called = self._called or wake
        if wake or self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            readers, self._urgent = self._urgent, {}
            self._called, resting = False, self._resting
            if not resting:
                readers, self._told = {**readers, **self._told}, {}
                self._resting = True
        start = self._loop.time()
        for reader in readers:
            self._tell(reader)
        if not resting:
            self._loop.call_soon(self._rest, start)  # runs after the readers, which were called before

    def _rest(self, start: float) -> None:
        seconds = min(_LONGEST_REST, (self._loop.time() - start) * (1 / _SHARE - 1))
        if seconds < _SHORTEST_REST:
            self._rested()
        else:
            self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        with self._lock:
            self._resting = False
            if not self._told or self._called:
                return
            self._called = True
        self._flush()
