"""Requests that must end by a certain moment."""

from __future__ import annotations

import heapq

from ..requests.request import Request

_LEAST_SWEPT = 64  # requests


class Deadlines:
    """Requests by deadline; looking costs nothing while none has passed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._added = 0
        self._swept_at = _LEAST_SWEPT  # length from which on those that ended in time are looked for

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is None:
            return
        if len(self._heap) >= self._swept_at:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
            self._swept_at = max(_LEAST_SWEPT, 2 * len(self._heap))
        self._added += 1
        heapq.heappush(self._heap, (request.deadline, self._added, request))

    def take(self, now: float) -> list[Request]:
        """Requests, finished or not, whose deadline has passed; they are watched no longer."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heapq.heappop(self._heap)[2])
        return passed
