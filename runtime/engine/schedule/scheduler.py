"""Which tokens of which requests the next step runs: continuous batching with chunked prefill.

Orca (Yu et al., OSDI 2022) decides anew at every iteration; Sarathi-Serve (arXiv:2403.02310) adds chunked
prefill within a token budget. A request has no phase: it has known tokens and computed ones, and steps close
the gap.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....providers.base import Row
from ..kv.prefix_cache import PrefixCache, StoredPrefixes
from ..kv.prefix_tree import PrefixMatch
from ..kv.slots import SlotTable
from ..requests.prompt_costs import PromptCosts
from ..requests.request import Request, RequestStatus
from .fairness import OUTPUT_WEIGHT, VirtualCounters
from .waiting import WaitingQueue

# Copying one token's KV costs about as much as this many rows of a decode run: 20-50 us against 2-4 ms, on a
# 0.6 B model on two CPU cores.
_COPY_COST = 0.01
# Computing a lost token anew costs about a row; one in four is taken to be wanted again.
_LOSS_COST = 0.25
# Of this many waiting requests, the one with the longest cached prefix goes first.
_LOOKAHEAD = 8
_MOST_OVERTAKEN = 16
# Logits of a prompt are wanted for at most so many tokens a step: of 150,000 tokens each, that is 75 MB.
_MOST_LOGITS = 128
# A prefix that another request is computing is worth waiting for from this length on.
_WORTH_WAITING = 16


@dataclass(slots=True)
class StepPlan:
    """Rows to run, the request of each, and how many tokens at each row's end are only proposed."""

    rows: list[Row] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    restoring: list[Request] = field(default_factory=list)  # get KV from the tiers instead of a row

    def add(self, request: Request, num_tokens: int) -> int:
        """Run up to ``num_tokens`` of the request's next tokens; return how many."""
        if request.awaits_prompt_logprobs:
            num_tokens = min(num_tokens, _MOST_LOGITS)
        start = request.num_computed
        stop = start + num_tokens
        assert request.slot is not None  # noqa: S101 -- only running requests are planned
        tokens = request.token_slice(start, stop)
        num_logits = int(stop == request.num_tokens and request.pooling is None)
        if request.awaits_prompt_logprobs:
            num_logits = max(num_logits, stop - max(start, request.first_prompt_logits))
        self.rows.append(Row(request.slot, tokens, start, num_logits))
        self.requests.append(request)
        self.proposed.append(0)
        return num_tokens

    def decoding(self) -> list[int]:
        """Those of them that lack nothing but the newest token."""
        return [i for i in self.drawing() if len(self.rows[i].tokens) - self.proposed[i] == 1]

    def drawing(self) -> list[int]:
        """The rows that end with the newest token of their requests, and have logits for the next."""
        triples = zip(self.rows, self.requests, self.proposed, strict=True)
        return [
            i
            for i, (row, request, extra) in enumerate(triples)
            if row.start + len(row.tokens) - extra == request.num_tokens and row.num_logits
        ]

    def lengthen(self, index: int, tokens: npt.NDArray[np.int64]) -> None:
        """Let a row check ``tokens``, proposed to follow its own."""
        row = self.rows[index]
        known_and_proposed = np.concatenate([row.tokens, tokens])
        self.rows[index] = Row(row.slot, known_and_proposed, row.start, row.num_logits + len(tokens))
        self.proposed[index] = len(tokens)

    def accepts(self, index: int, position: int, token: int) -> bool:
        """Whether the row's proposed token at ``position`` of its proposals is ``token``."""
        extra = self.proposed[index]
        return position < extra and int(self.rows[index].tokens[position - extra]) == token

    def withdraw(self) -> None:
        """Take all proposed tokens out of the rows again."""
        for i, extra in enumerate(self.proposed):
            row = self.rows[i]
            if extra:
                self.rows[i] = Row(row.slot, row.tokens[:-extra], row.start, row.num_logits - extra)
        self.proposed = [0] * len(self.rows)

    def without(self, failed: Collection[int]) -> StepPlan:
        """The plan less the rows at the ``failed`` positions."""
        kept = [i for i in range(len(self.rows)) if i not in failed]
        rows, requests = [self.rows[i] for i in kept], [self.requests[i] for i in kept]
        return StepPlan(rows, requests, [self.proposed[i] for i in kept])


class Scheduler:
    """Plans steps and keeps the books of requests and slots. Knows neither tensors nor texts.

    Args:
        slots: the KV bookkeeping.
        max_step_tokens: most tokens of one step; at least ``slots.num_slots``.
        prefix_cache: whether requests find KV that others computed.
        stretch: how much longer a step may take for the prompt tokens beside its decode rows.
        costs: what prompt tokens cost, learned here.
        stored: KV outside of the slots; None is none.
        trims_always: see ``PrefixCache``.
    """

    def __init__(
        self,
        slots: SlotTable,
        max_step_tokens: int,
        *,
        prefix_cache: bool = False,
        stretch: float = float("inf"),
        costs: PromptCosts | None = None,
        stored: StoredPrefixes | None = None,
        trims_always: bool = False,
    ) -> None:
        self.preemptions = 0
        self.costs = costs or PromptCosts()
        self.cache = PrefixCache(slots, enabled=prefix_cache, stored=stored, trims_always=trims_always)
        self._slots = slots
        self._max_step_tokens = max_step_tokens
        self._stretch = stretch
        self._served = VirtualCounters()
        self._waiting = WaitingQueue(self._served)
        self._running: list[Request] = []
        self._arrivals = 0
        self._waste = 0  # rows' worth of decode work lost to gaps between slots since the last compaction

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
        self._served.join(request.tenant)
        self._waiting.push(request)

    def plan(self) -> StepPlan:
        """Choose the next step's rows: decode first, then prompts in progress, then new requests."""
        plan = StepPlan()
        self._compact()
        self._grow_running()
        prefilling = []
        for request in self._running:
            if request.num_uncomputed == 0:
                continue  # its next token waits for a grammar
            if request.num_uncomputed == 1:
                plan.add(request, 1)
            elif request.restorable > request.num_computed:
                plan.restoring.append(request)
            else:
                prefilling.append(request)
        budget = self._prompt_budget(len(plan.rows), len(prefilling))
        for request in sorted(prefilling, key=self._turn):
            budget = self._admit(plan, budget, before=request)
            if budget > 0:
                budget -= plan.add(request, min(request.num_uncomputed, budget))
        self._admit(plan, budget)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Note that the plan's rows were computed."""
        # A gap costs about a row: either one slot rides along idle, or the run is cut in two.
        self._waste += len(self._slots.gaps())
        for row, request, extra in zip(plan.rows, plan.requests, plan.proposed, strict=True):
            request.num_computed = row.start + len(row.tokens) - extra
            self.cache.progress(request)
            self._served.charge(request.tenant, len(row.tokens) + OUTPUT_WEIGHT * (row.num_logits > 0))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Note how long the plan's rows took, unless proposals blur what took the time."""
        if not any(plan.proposed):
            prompts = [len(row.tokens) for row in plan.rows if len(row.tokens) > 1]
            self.costs.observe(len(plan.rows) - len(prompts), len(prompts), sum(prompts), seconds)

    def lend(self, request: Request, num_tokens: int) -> bool:
        """Make room for KV of tokens that are only proposed, at no running request's cost; tell whether."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        if not self.cache.make_room(num_tokens):
            return False
        self._slots.grow(request.slot, self._slots.tokens(request.slot) + num_tokens)
        return True

    def settle(self, plan: StepPlan) -> None:
        """Note which of the plan's proposed tokens are known now, and take back the room lent to others."""
        for request, extra in zip(plan.requests, plan.proposed, strict=True):
            if request.slot is None:
                continue
            if self._slots.tokens(request.slot) > request.num_kept:
                self._slots.grow(request.slot, request.num_computed - request.num_dropped)
            if extra:
                self.cache.progress(request)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Forget a request, finished or not; ``keep`` what it computed for others."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self.cache.leave(request, keep=keep)
        self._served.leave(request.tenant)

    def preempt(self, request: Request, *, keep: bool = True) -> None:
        """Take the slot from a running request, which will be computed again later."""
        self._running.remove(request)
        self.cache.leave(request, keep=keep)
        request.num_computed = request.num_dropped = 0
        request.status = RequestStatus.WAITING
        request.resumes, request.stored, request.restorable = True, None, 0
        self._waiting.push(request)
        self.preemptions += 1

    def drop(self, request: Request, num_tokens: int) -> None:
        """Note that KV of so many of a running request's tokens is gone for good."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        request.num_dropped += num_tokens
        self._slots.grow(request.slot, self._slots.tokens(request.slot) - num_tokens)
        self.cache.withdraw(request)

    def restart(self, request: Request) -> None:
        """Note that a running request's tokens are others from ``num_computed`` on."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        self._slots.grow(request.slot, request.num_tokens)
        self.cache.replace(request)

    def lose(self, slot: int) -> None:
        """Give up a slot whose content could not be copied; its request, if any, is computed again."""
        for request in self.running:
            if request.slot == slot:
                self.preempt(request, keep=False)
        if self._slots.is_idle(slot):
            self.cache.evict(slot, save=False)

    def check_integrity(self) -> None:
        """Check that requests and slots agree.

        Raises:
            RuntimeError: they do not; the message says how.
        """
        self._slots.check_integrity()
        self.cache.check_integrity()
        slots = [request.slot for request in self._running]
        if None in slots or len(set(slots)) != len(slots) or len(slots) != self._slots.num_used:
            raise RuntimeError(f"{self._slots.num_used} slots are in use, running requests hold {slots}")
        for request in self._running:
            assert request.slot is not None  # noqa: S101 -- checked above
            held = self._slots.tokens(request.slot)
            if request in self._waiting or request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"{request} runs, but its status or the queue says otherwise")
            if not request.num_computed <= held + request.num_dropped <= request.num_tokens:
                raise RuntimeError(f"{request} has {request.num_computed} computed tokens, its slot {held}")

    def _compact(self) -> None:
        """Move the highest slot into the lowest gap, if the gaps have cost as much as the copy does.

        Waiting for the waste to reach the price is at most twice as dear as knowing the future (ski rental;
        Karlin et al., Competitive Snoopy Caching, 1988).
        """
        gaps = self._slots.gaps()
        if not gaps:
            self._waste = 0
            return
        source, target = self._slots.highest(), gaps[0][0]
        request = next(request for request in self._running if request.slot == source)
        copied, lost = self.cache.price_of_move(target)
        if self._waste < _COPY_COST * (request.num_computed + copied) + _LOSS_COST * lost:
            return
        self._waste = 0
        self.cache.move(source, target, request.num_computed)
        request.slot = target

    def _grow_running(self) -> None:
        """Make room for each running request's newest token, at the cost of the youngest."""
        for request in sorted(self._running, key=lambda r: r.order):
            while request.slot is not None and not self.cache.make_room(self._growth(request)):
                self.preempt(max(self._running, key=lambda r: r.order))
            if request.slot is not None:
                self._slots.grow(request.slot, request.num_kept)

    def _growth(self, request: Request) -> int:
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        return request.num_kept - self._slots.tokens(request.slot)

    def _prompt_budget(self, rows: int, prefilling: int) -> int:
        """Prompt tokens beside ``rows`` running streams: as many as the step may be stretched for.

        A request that waits for its first token counts as much as a stream that waits for its next one: where
        more wait than stream, prompts get more of the step in proportion.
        """
        most = self._max_step_tokens - rows
        if not rows or not (prefilling or len(self._waiting)) or self._stretch == float("inf"):
            return most
        starting = prefilling + min(len(self._waiting), self._slots.num_slots - self._slots.num_used)
        stretch = 1.0 + (self._stretch - 1.0) * max(1.0, starting / rows)
        affordable = self.costs.prompt_tokens(rows, stretch)
        return most if affordable is None else min(most, affordable)

    def _turn(self, request: Request) -> tuple[int, float, int]:
        """Sorts requests whose prompts compete for a step's tokens."""
        return request.priority, self._served.served(request.tenant), request.arrival_index

    def _admit(self, plan: StepPlan, budget: int, before: Request | None = None) -> int:
        """Start waiting requests, only those whose turn is ``before`` that one's; return the tokens left."""
        while budget > 0 and self._slots.num_used < self._slots.num_slots:
            head = self._waiting.first(1)
            if head and before is not None and self._turn(head[0]) > self._turn(before):
                break
            chosen = self._choose() if head else None
            # A token of headroom for each, or the next step would preempt what this one began.
            headroom = len(self._running) + 1 if self._running else 0
            if chosen is None or not self.cache.place(*chosen, headroom):
                break
            request, match = chosen
            head[0].overtaken += request is not head[0]
            self._waiting.remove(request)
            self._served.chosen(request.tenant)
            self._start(request, match)
            if request.restorable:
                plan.restoring.append(request)
                continue
            budget -= plan.add(request, min(request.num_uncomputed, budget))
        return budget

    def _choose(self) -> tuple[Request, PrefixMatch] | None:
        """The request to admit: of the first few, the one with the longest cached prefix.

        One whose prefix is being computed waits for that. Nobody waits so for ever, and nobody overtakes a
        request that was preempted.
        """
        candidates = self._waiting.first(_LOOKAHEAD if self.cache.enabled else 1)
        head = candidates[0]
        if head.resumes or head.overtaken >= _MOST_OVERTAKEN:
            return head, self.cache.match(head)
        best, longest = None, -1
        for request in candidates:
            match = self.cache.match(request)
            length = max(match.length, self.cache.stored(request))
            awaited = match.known - length >= _WORTH_WAITING
            if length > longest and not awaited:
                best, longest = (request, match), length
        return best

    def _start(self, request: Request, match: PrefixMatch) -> None:
        request.status = RequestStatus.RUNNING
        request.resumes = False
        if request.metrics.first_scheduled is None:
            request.metrics.first_scheduled = time.monotonic()
            request.metrics.cached_tokens = match.length
        self._running.append(request)
