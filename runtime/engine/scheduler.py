"""Which tokens of which requests the next step runs: continuous batching with chunked prefill.

Orca (Yu et al., OSDI 2022) decides anew at every iteration; Sarathi-Serve (arXiv:2403.02310) adds chunked
prefill within a token budget. A request has no phase: it has known tokens and computed ones, and steps close
the gap.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...providers.base import Row
from .request import Request, RequestStatus
from .slots import SlotTable
from .waiting import WaitingQueue

# Copying one token's KV costs about as much as this many rows of a decode run: 20-50 us against 2-4 ms, on a
# 0.6 B model on two CPU cores.
_COPY_COST = 0.01


@dataclass(slots=True)
class StepPlan:
    """Rows to run, and the request of each."""

    rows: list[Row] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int) -> int:
        """Run the request's next ``num_tokens`` tokens; logits are wanted only once all are known."""
        start = request.num_computed
        stop = start + num_tokens
        assert request.slot is not None  # noqa: S101 -- only running requests are planned
        tokens = request.token_slice(start, stop)
        self.rows.append(Row(request.slot, tokens, start, num_logits=int(stop == request.num_tokens)))
        self.requests.append(request)
        return num_tokens

    def without(self, failed: Iterable[int]) -> StepPlan:
        """The plan less the rows at the ``failed`` positions."""
        gone = set(failed)
        kept = [i for i in range(len(self.rows)) if i not in gone]
        return StepPlan([self.rows[i] for i in kept], [self.requests[i] for i in kept])


@dataclass(frozen=True, slots=True)
class Move:
    """KV to copy from one slot to another."""

    request: Request
    source: int
    target: int
    length: int


class Scheduler:
    """Plans steps and keeps the books of requests and slots. Knows neither tensors nor texts.

    Args:
        slots: the KV bookkeeping.
        max_step_tokens: most tokens of one step; at least ``slots.num_slots``.
    """

    def __init__(self, slots: SlotTable, max_step_tokens: int) -> None:
        self.preemptions = 0
        self._slots = slots
        self._max_step_tokens = max_step_tokens
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._arrivals = 0
        self._idle_rows = 0  # rows that decode runs wasted on holes since the last compaction

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests with a slot."""
        return tuple(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self._waiting.push(request)

    def plan(self) -> StepPlan:
        """Choose the next step's rows: decode first, then prompts in progress, then new requests."""
        plan = StepPlan()
        self._grow_running()
        budget = self._max_step_tokens
        prefilling = []
        for request in self._running:
            if request.num_uncomputed == 1:
                budget -= plan.add(request, 1)
            else:
                prefilling.append(request)
        for request in prefilling:
            if budget > 0:
                budget -= plan.add(request, min(request.num_uncomputed, budget))
        self._admit(plan, budget)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Note that the plan's rows were computed."""
        self._idle_rows += self._slots.highest + 1 - self._slots.num_used
        for row, request in zip(plan.rows, plan.requests, strict=True):
            request.num_computed = row.start + len(row.tokens)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not; its slot is free at once."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)

    def preempt(self, request: Request) -> None:
        """Take the slot from a running request, which will be computed again later."""
        self._running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.status = RequestStatus.WAITING
        self._waiting.push(request)
        self.preemptions += 1

    def compact(self) -> Move | None:
        """Move the highest slot into a hole, if the holes have cost as much as the copy does.

        Waiting for the waste to reach the price is at most twice as dear as knowing the future (ski rental;
        Karlin et al., Competitive Snoopy Caching, 1988). The books are changed at once; the caller copies.
        """
        if self._waiting or self._slots.lowest_hole() is None:
            return None
        highest = self._slots.highest
        request = next(request for request in self._running if request.slot == highest)
        if self._idle_rows < _COPY_COST * request.num_computed:
            return None
        self._idle_rows = 0
        source, target = self._slots.move_highest()
        request.slot = target
        return Move(request, source, target, request.num_computed)

    def check_integrity(self) -> None:
        """Check that requests and slots agree.

        Raises:
            RuntimeError: they do not; the message says how.
        """
        self._slots.check_integrity()
        slots = [request.slot for request in self._running]
        if None in slots or len(set(slots)) != len(slots) or len(slots) != self._slots.num_used:
            raise RuntimeError(f"{self._slots.num_used} slots are in use, running requests hold {slots}")
        for request in self._running:
            assert request.slot is not None  # noqa: S101 -- checked above
            held = self._slots.tokens(request.slot)
            if request in self._waiting or request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"{request} runs, but its status or the queue says otherwise")
            if not request.num_computed <= held <= request.num_tokens:
                raise RuntimeError(f"{request} has {request.num_computed} computed tokens, its slot {held}")

    def _grow_running(self) -> None:
        """Make room for each running request's newest token, at the cost of the youngest."""
        for request in sorted(self._running, key=lambda r: r.order):
            while request.slot is not None and not self._slots.can_grow(request.slot, request.num_tokens):
                self.preempt(max(self._running, key=lambda r: r.order))
            if request.slot is not None:
                self._slots.grow(request.slot, request.num_tokens)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and (request := self._waiting.peek()) is not None:
            # A token of headroom for each, or the next step would preempt what this one began.
            headroom = len(self._running) + 1 if self._running else 0
            if not self._slots.can_allocate(request.num_tokens + headroom):
                break
            self._waiting.remove(request)
            request.slot = self._slots.allocate(request.num_tokens)
            request.status = RequestStatus.RUNNING
            request.metrics.first_scheduled = request.metrics.first_scheduled or time.monotonic()
            self._running.append(request)
            budget -= plan.add(request, min(request.num_uncomputed, budget))

    def _release(self, request: Request) -> None:
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        self._slots.free(request.slot)
        request.slot = None
