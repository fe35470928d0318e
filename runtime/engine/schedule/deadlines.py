"""Requests with a deadline, ordered by it."""

from __future__ import annotations

import heapq
import math

from ..requests.request import Request

_MIN_SWEEP = 64  # entries


class Deadlines:
    """A heap of requests by deadline. Finished requests are swept out when the heap has doubled.

    Attributes:
        first: the earliest deadline; inf if there is none.
    """

    def __init__(self) -> None:
        self.first = math.inf
        self._heap: list[tuple[float, int, Request]] = []
        self._added = 0
        self._sweep_at = _MIN_SWEEP  # heap size at which finished requests are removed

    def add(self, request: Request) -> None:
        """Add a request, if it has a deadline."""
        if request.deadline is None:
            return
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))
        self._added += 1
        heapq.heappush(self._heap, (request.deadline, self._added, request))
        self.first = self._heap[0][0]

    def take(self, now: float) -> list[Request]:
        """Remove and return the requests, finished or not, whose deadline has passed."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[2])
        self.first = self._heap[0][0] if self._heap else math.inf
        return passed
