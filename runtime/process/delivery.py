"""Hand states from a thread to an event loop, with few wake-ups of the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# Reading states takes at most this share of the time of an event loop, unless states would become older than
# ``_LONGEST_REST`` seconds. Rests below ``_SHORTEST_REST`` seconds would cost more than they save.
_SHARE = 0.05
_LONGEST_REST = 0.025
_SHORTEST_REST = 0.001


class Delivery(Generic[K, V]):
    """Carries the newest states of several readers to their event loop, and wakes it once for all of them.

    After the readers ran, the loop rests: states that arrive meanwhile wait, and newer ones replace them. The
    rest is in proportion to the time that the readers took, so that they take at most ``_SHARE`` of the time:
    few readers of a slow model get each state at once, many readers of a fast model get several tokens in
    one. Urgent states come before the others, and do not wait for the end of the rest; the others do.

    Args:
        loop: the event loop of the readers.
        deliver: gives a reader its state; called in the loop. The reader goes on in a later call of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[K, V], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._lock = threading.Lock()
        self._states: dict[K, V] = {}  # guarded by _lock, as are the next three
        self._urgent: dict[K, V] = {}
        self._called = False  # whether the loop will run ``_flush``
        self._resting = False

    def post(self, states: Mapping[K, V], urgent: Collection[K] = ()) -> None:
        """Hand over states; called in any thread.

        Args:
            states: the state of each reader.
            urgent: the readers whose states are urgent.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:
            self._states.update(states)
            self._urgent.update({reader: self._states.pop(reader) for reader in urgent})
            wake = not self._called and (bool(urgent) or not self._resting)
            self._called = self._called or wake
        if wake or self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            states, self._urgent = self._urgent, {}
            self._called, resting = False, self._resting
            if not resting:
                states, self._states = {**states, **self._states}, {}  # the latter are newer
                self._resting = True
        start = self._loop.time()
        for reader, state in states.items():
            self._deliver(reader, state)
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
            if not self._states or self._called:
                return
            self._called = True
        self._flush()
