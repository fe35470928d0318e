"""The queue of requests that wait for a slot."""

from __future__ import annotations

import heapq

from ..requests.request import Request

# A generated token costs twice a prompt token, as in the paper (section 4.1).
OUTPUT_WEIGHT = 2.0
_MAX_IDLE_TENANTS = 1024


class VirtualCounters:
    """Weighted tokens served to each tenant; the tenant with the smallest counter is served next.

    The counter of a tenant that returns after a pause is raised to the largest counter at an admission, so
    that no tenant saves up service. A larger counter stays as it is.
    """

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._active: dict[str | None, int] = {}  # unfinished requests
        self._floor = 0.0  # the largest counter at an admission

    def join(self, tenant: str | None) -> None:
        """Count another unfinished request of a tenant."""
        if tenant not in self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str | None) -> None:
        """Count a request of a tenant as gone."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
        if len(self._served) > 2 * len(self._active) + _MAX_IDLE_TENANTS:
            self._forget()

    def chosen(self, tenant: str | None) -> None:
        """Note that a request of this tenant was admitted."""
        self._floor = max(self._floor, self.served(tenant))

    def charge(self, tenant: str | None, cost: float) -> None:
        """Add weighted tokens to a tenant's counter."""
        self._served[tenant] = self.served(tenant) + cost

    def served(self, tenant: str | None) -> float:
        """Return a tenant's counter, in weighted tokens."""
        return self._served.get(tenant, self._floor)

    def _forget(self) -> None:
        """Drop inactive tenants whose counter would be raised anyway."""
        self._served = {t: n for t, n in self._served.items() if t in self._active or n > self._floor}


class _TenantQueue:
    """Requests of one tenant, or preempted ones, in order of arrival. Removal is lazy."""

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
            # Lazy deletion can leave duplicates; skip them.
            if entry[0] in self.live and entry not in entries:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self.heap, entry)
        return [request for _, request in entries]


class _PriorityLevel:
    """Requests of one priority: preempted ones, and a queue for each waiting tenant."""

    def __init__(self) -> None:
        self.resumed = _TenantQueue()
        self.lines: dict[str | None, _TenantQueue] = {}
        self.tenants: list[tuple[float, int, str | None]] = []  # a heap: counter, queue number, tenant

    def line(self, request: Request) -> _TenantQueue:
        return self.resumed if request.resumes else self.lines[request.tenant]


class WaitingQueue:
    """Requests by priority; within a priority, preempted ones, then those of the least served tenant.

    Requests of one tenant are in order of arrival. Each operation costs amortized O(log n).

    Args:
        counters: service received by each tenant.

    Attributes:
        size: the number of requests.
        tokens: the sum of their ``queued_tokens``.
    """

    def __init__(self, counters: VirtualCounters | None = None) -> None:
        self._counters = counters or VirtualCounters()
        self._levels: dict[int, _PriorityLevel] = {}
        self._priorities: list[int] = []  # a heap of priorities, including some whose level is empty
        self._noted: set[int] = set()
        self.size = self.tokens = 0
        self._num_queues = 0  # created so far

    def __len__(self) -> int:
        return self.size

    def __contains__(self, request: Request) -> bool:
        level = self._levels.get(request.priority)
        if level is None or not (request.resumes or request.tenant in level.lines):
            return False
        return request.arrival_index in level.line(request).live

    def push(self, request: Request) -> None:
        """Add a request; ``arrival_index`` is its position in its tenant's queue."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _PriorityLevel()
            if request.priority not in self._noted:
                self._noted.add(request.priority)
                heapq.heappush(self._priorities, request.priority)
        if not request.resumes and request.tenant not in level.lines:
            self._num_queues += 1
            level.lines[request.tenant] = _TenantQueue(self._num_queues)
            served = self._counters.served(request.tenant)
            heapq.heappush(level.tenants, (served, self._num_queues, request.tenant))
        level.line(request).push(request)
        self.size += 1
        self.tokens += request.queued_tokens

    def first(self, count: int) -> list[Request]:
        """Return up to ``count`` requests to serve next, in order, all of one tenant or all preempted."""
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
        """Remove a request from any position."""
        level = self._levels[request.priority]
        line = level.line(request)
        line.remove(request)
        self.size -= 1
        self.tokens -= request.queued_tokens
        if not line.live and not request.resumes:
            del level.lines[request.tenant]
        if not level.lines and not level.resumed.live:
            del self._levels[request.priority]

    def _least_served(self, level: _PriorityLevel) -> str | None:
        """Return the waiting tenant with the smallest counter.

        Counters only grow, so heap entries are lower bounds: the first entry that is current is the smallest.
        """
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
