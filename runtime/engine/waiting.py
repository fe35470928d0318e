"""Requests that wait for a slot."""

from __future__ import annotations

import heapq

from .request import Request


class WaitingQueue:
    """Requests in order of priority, then of arrival. Nothing here costs more than O(log n) a request.

    A removed request stays in the heap as a dead entry until it surfaces, or until half the heap is dead.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._live: set[int] = set()  # arrival indices

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_index in self._live

    def push(self, request: Request) -> None:
        """Add a request; its ``arrival_index`` decides where it stands."""
        heapq.heappush(self._heap, (request.order, request))
        self._live.add(request.arrival_index)

    def first(self, count: int) -> list[Request]:
        """The up to ``count`` requests to serve next, in order."""
        entries: list[tuple[tuple[int, int], Request]] = []
        while self._heap and len(entries) < count:
            entry = heapq.heappop(self._heap)
            # A request removed and pushed again is there twice.
            if entry[1].arrival_index in self._live and entry not in entries:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [request for _, request in entries]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._live.remove(request.arrival_index)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1].arrival_index in self._live]
            heapq.heapify(self._heap)
