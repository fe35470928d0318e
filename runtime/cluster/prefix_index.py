"""Which replicas have the beginnings of which prompts in their prefix caches."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

_CAPACITY = 200_000  # beginnings of prompts
# A text is evicted a little before the front learns when it was last used.
_MARGIN = 1.0


class PrefixIndex:
    """Beginnings of prompts, as hashes of their chunks, and when each replica last used them.

    A replica evicts the texts first that were not used for the longest time. So it tells with each answer
    since when what was used is still there, and what was not used since is forgotten. Any thread may call.

    Args:
        clock: returns seconds.
        capacity: number of beginnings; those that were not used for the longest time go first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, capacity: int = _CAPACITY) -> None:
        self._clock, self._capacity = clock, capacity
        self._used: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._since: dict[str, float] = {}  # by replica, the time since which nothing was evicted
        self._lock = threading.Lock()

    def use(self, chunks: Sequence[bytes], replica: str) -> None:
        """Record that a replica computes a prompt, or has just done so."""
        now = self._clock()
        with self._lock:
            for chunk in chunks:
                self._used.setdefault(chunk, {})[replica] = now
                self._used.move_to_end(chunk)
            while len(self._used) > self._capacity:
                self._used.popitem(last=False)

    def holds_since(self, replica: str, seconds: float | None) -> None:
        """Record that a replica still holds what was used in the last ``seconds``; None is everything."""
        if seconds is not None:
            since = self._clock() - seconds + _MARGIN
            with self._lock:
                self._since[replica] = max(since, self._since.get(replica, since))

    def held(self, chunks: Sequence[bytes]) -> dict[str, int]:
        """Return by replica how many of the first chunks of a prompt it holds, if it holds any."""
        found: dict[str, int] = {}
        with self._lock:
            for count, chunk in enumerate(chunks):
                known = self._used.get(chunk, {})
                going = [
                    replica
                    for replica, used in known.items()
                    if found.get(replica, 0) == count and used >= self._since.get(replica, used)
                ]
                if not going:
                    break
                found |= dict.fromkeys(going, count + 1)
        return found


INDEX = PrefixIndex()  # of this process: Ray makes the router, and the front has no other way to it
