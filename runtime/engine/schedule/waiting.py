"""Requests that wait for a slot."""

from __future__ import annotations

import heapq

from ..requests.request import Request
from .fairness import VirtualCounters


class _Line:
    """Requests of one tenant, or resumed ones, by arrival. Removed ones stay until they surface."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.heap: list[tuple[int, Request]] = []
        self.live: set[int] = set()  # arrival indices

    def push(self, request: Request) -> None:
        heapq.heappush(self.heap, (request.arrival_index, request))
        self.live.add(request.arrival_index)

    def remove(self, request: Request) -> None:
        self.live.remove(request.arrival_index)
        if len(self.heap) > 2 * len(self.live) + 16:
            self.heap = [entry for entry in self.heap if entry[0] in self.live]
            heapq.heapify(self.heap)

    def first(self, count: int) -> list[Request]:
        entries: list[tuple[int, Request]] = []
        while self.heap and len(entries) < count:
            entry = heapq.heappop(self.heap)
            # A request removed and pushed again is there twice.
            if entry[0] in self.live and entry not in entries:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self.heap, entry)
        return [request for _, request in entries]


class _Level:
    """Requests of one priority: resumed ones, and a line for each tenant that waits."""

    def __init__(self) -> None:
        self.resumed = _Line()
        self.lines: dict[str | None, _Line] = {}
        self.tenants: list[tuple[float, int, str | None]] = []  # a heap: service, line, tenant

    def line(self, request: Request) -> _Line:
        return self.resumed if request.resumes else self.lines[request.tenant]


class WaitingQueue:
    """Requests by priority; within one, those that were preempted, then the least served tenant's.

    A tenant's own requests are in order of arrival. Nothing costs more than O(log n), however many wait.

    Args:
        counters: service received by each tenant.
    """

    def __init__(self, counters: VirtualCounters | None = None) -> None:
        self._counters = counters or VirtualCounters()
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # a heap of the levels there are, and of some that are gone
        self._noted: set[int] = set()
        self._size = 0
        self._lines = 0  # made so far

    def __len__(self) -> int:
        return self._size

    def __contains__(self, request: Request) -> bool:
        level = self._levels.get(request.priority)
        if level is None or not (request.resumes or request.tenant in level.lines):
            return False
        return request.arrival_index in level.line(request).live

    def push(self, request: Request) -> None:
        """Add a request; its ``arrival_index`` decides where it stands within its line."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
            if request.priority not in self._noted:
                self._noted.add(request.priority)
                heapq.heappush(self._priorities, request.priority)
        if not request.resumes and request.tenant not in level.lines:
            self._lines += 1
            level.lines[request.tenant] = _Line(self._lines)
            served = self._counters.served(request.tenant)
            heapq.heappush(level.tenants, (served, self._lines, request.tenant))
        level.line(request).push(request)
        self._size += 1

    def first(self, count: int) -> list[Request]:
        """The up to ``count`` requests to serve next, all of one line, in order."""
        while self._priorities:
            level = self._levels.get(self._priorities[0])
            if level is None:
                self._noted.remove(heapq.heappop(self._priorities))
            elif level.resumed.live:
                return level.resumed.first(count)
            else:
                return level.lines[self._least_served(level)].first(count)
        return []

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        level = self._levels[request.priority]
        line = level.line(request)
        line.remove(request)
        self._size -= 1
        if not line.live and not request.resumes:
            del level.lines[request.tenant]
        if not level.lines and not level.resumed.live:
            del self._levels[request.priority]

    def _least_served(self, level: _Level) -> str | None:
        """The waiting tenant with the lowest counter; counters have only risen since they were noted."""
        while True:
            noted, number, tenant = level.tenants[0]
            line = level.lines.get(tenant)
            if line is None or line.number != number:
                heapq.heappop(level.tenants)
                continue
            served = self._counters.served(tenant)
            if served <= noted:
                return tenant
            heapq.heapreplace(level.tenants, (served, number, tenant))
