"""The scheduler: choose the rows of each step, by continuous batching with chunked prefill.

Continuous batching schedules anew at every step (Orca, Yu et al., OSDI 2022). Chunked prefill splits prompts
to fit a token budget (Sarathi-Serve, arXiv:2403.02310). Requests have no prefill or decode phase: each has
known tokens and computed tokens, and a step computes some of the difference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....providers.base import Row
from ....records import dataclass
from ...process.threads import works_at_lower_priority
from ..kv.held_blocks import HeldBlocks
from ..kv.prefix_cache import PrefixCache, StoredPrefixes
from ..kv.prefix_tree import PrefixMatch
from ..kv.slots import SlotTable
from ..requests.prompt_costs import PromptCosts
from ..requests.request import Request, RequestStatus
from .adapter_places import AdapterPlaces
from .waiting import OUTPUT_WEIGHT, VirtualCounters, WaitingQueue

_log = logging.getLogger(__name__)

# Of this many waiting requests, the one with the longest cached prefix is admitted first.
_LOOKAHEAD = 8
_MAX_OVERTAKES = 16
# Maximum prompt tokens with logits in a step: 75 MB for a vocabulary of 150,000 tokens.
_MAX_PROMPT_LOGITS = 128
# A request waits for a prefix that another request is computing only if it is at least this long.
_MIN_AWAITED_PREFIX = 16
_PLACEHOLDER = np.full(1, -1, np.int64)  # no token
# Shorter prompts count as new without a look at the cache.
_SHORT_PROMPT = 64
# How much several requests that wait for their first token outweigh streams. At 8 streams of a closed loop, 6
# takes 35 % off the time to the first token, for a p95 between tokens of 68 instead of 50 ms (simulated; see
# docs/engine.md).
_BACKLOG = 6.0
# The part of what prompts may add to a step that those with pictures do: 1.75 times a step for 2.25. They
# have waited for their towers, so smaller pieces add a few percent to the time until the first token, and
# these are the longest 1 % of others' gaps (docs/pictures.md).
_PICTURES = 0.6


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step. A plan does not change; a row may hold a placeholder (``Row.source``).

    Args:
        rows: what the runner runs.
        requests: per row, its request.
        proposed: per row, how many tokens at its end are proposals.
        sampling: indices of the rows that end with the newest token of their request and have its logits.
        restoring: requests without a row: their KV is restored from tiers.
        observed: whether a request wants logits or hidden states of its prompt.
        constrained: whether a grammar restricts a request.
        ahead: whether the plan was made while the step before it was in flight.
    """

    rows: tuple[Row, ...] = ()
    requests: tuple[Request, ...] = ()
    proposed: tuple[int, ...] = ()
    sampling: tuple[int, ...] = ()
    restoring: tuple[Request, ...] = ()
    observed: bool = False
    constrained: bool = False
    ahead: bool = False

    def decode_rows(self) -> list[int]:
        """Return the indices of rows that compute one known token and sample the next."""
        return [i for i in self.sampling if len(self.rows[i].tokens) - self.proposed[i] == 1]

    def with_proposals(self, proposals: Mapping[int, npt.NDArray[np.int64]]) -> StepPlan:
        """Return the plan with proposed tokens, by row, so that the step verifies them."""
        rows, proposed = list(self.rows), list(self.proposed)
        for index, tokens in proposals.items():
            row = rows[index]
            known_and_proposed = np.concatenate([row.tokens, tokens])
            rows[index] = replace(
                row,
                tokens=known_and_proposed,
                num_logits=row.num_logits + len(tokens),
                proposed=len(tokens),
            )
            proposed[index] = len(tokens)
        return replace(self, rows=tuple(rows), proposed=tuple(proposed))

    def accepts(self, index: int, position: int, token: int) -> bool:
        """Whether the row's proposed token number ``position``, counted from 0, is ``token``."""
        extra = self.proposed[index]
        return position < extra and int(self.rows[index].tokens[position - extra]) == token

    def known(self) -> StepPlan:
        """Return the plan with known tokens alone: no proposals, and tokens instead of placeholders."""
        rows = list(self.rows)
        for i, (row, request, extra) in enumerate(zip(rows, self.requests, self.proposed, strict=True)):
            if extra:
                states = row.last_hidden_states
                rows[i] = replace(
                    row,
                    tokens=row.tokens[:-extra],
                    num_logits=row.num_logits - extra,
                    proposed=0,
                    last_hidden_states=None if states is None else states[:-extra],
                )
            elif row.source is not None:
                rows[i] = replace(row, tokens=request.token_slice(row.start, row.start + 1), source=None)
        return replace(self, rows=tuple(rows), proposed=(0,) * len(rows))

    def without(self, dropped: Collection[int]) -> StepPlan:
        """Return the plan without the rows at the ``dropped`` indices."""
        kept = [i for i in range(len(self.rows)) if i not in dropped]
        places = {old: new for new, old in enumerate(kept)}
        return replace(
            self,
            rows=tuple(self.rows[i] for i in kept),
            requests=tuple(self.requests[i] for i in kept),
            proposed=tuple(self.proposed[i] for i in kept),
            sampling=tuple(places[i] for i in self.sampling if i in places),
        )


class _Draft:
    """A plan in the making.

    Args:
        whole_pictures: no row may end within a picture.
    """

    def __init__(self, *, whole_pictures: bool) -> None:
        self._whole_pictures = whole_pictures
        self.rows: list[Row] = []
        self.requests: list[Request] = []
        self.sampling: list[int] = []
        self.restoring: list[Request] = []
        self.observed = self.constrained = False

    def add(self, request: Request, start: int, num_tokens: int) -> int:
        """Add a row of up to ``num_tokens`` of the request's tokens from ``start`` on; return how many.

        They are more where the first of them is of a picture that has more and must not be cut.
        """
        observed = request.observes_prompt
        if observed and request.awaits_prompt_logprobs:
            num_tokens = min(num_tokens, _MAX_PROMPT_LOGITS)
        stop = start + num_tokens
        if self._whole_pictures and request.images is not None:
            stop = request.images.whole(start, stop)
        assert request.slot is not None  # noqa: S101 -- only running requests are planned
        row = Row(request.slot, request.token_slice(start, stop), start, 0, lora=request.lora_place)
        row.encoder = request.encoder if start == 0 else None
        if request.images is not None:
            row.rope_positions = request.images.rope_positions(start, stop)
            if (seen := request.images.part(start, stop)) is not None:
                row.image_states, row.image_rows = seen
                if self._whole_pictures:
                    row.image_ahead = request.images.ahead[start:stop]
        if stop == request.num_tokens and request.pooling is None:
            row.num_logits = 1
            self.sampling.append(len(self.rows))
        if observed:
            self.observed = True
            if request.awaits_prompt_logprobs:
                row.num_logits = max(row.num_logits, stop - max(start, request.first_prompt_logits))
        if request.grammar is not None:
            self.constrained = True
        self.rows.append(row)
        self.requests.append(request)
        return stop - start

    def add_placeholder(self, request: Request, source: int) -> None:
        """Add a row of the token that row ``source`` of the step in flight draws."""
        assert request.slot is not None  # noqa: S101 -- only running requests are planned
        start = request.num_tokens
        self.sampling.append(len(self.rows))
        row = Row(request.slot, _PLACEHOLDER.copy(), start, lora=request.lora_place, source=source)
        if request.images is not None:
            row.rope_positions = request.images.rope_positions(start, start + 1)
        self.rows.append(row)
        self.requests.append(request)

    def plan(self, *, ahead: bool = False) -> StepPlan:
        """Return the plan."""
        return StepPlan(
            tuple(self.rows),
            tuple(self.requests),
            (0,) * len(self.rows),
            tuple(self.sampling),
            tuple(self.restoring),
            self.observed,
            self.constrained,
            ahead,
        )


class Scheduler:
    """Plan steps, and track which request holds which slot. It handles neither tensors nor text.

    Args:
        slots: the table of KV slots.
        max_step_tokens: maximum tokens of one step; at least ``slots.num_slots``.
        prefix_cache: whether requests reuse KV that others computed.
        stretch: maximum ratio of a step's duration with prompt tokens to its duration without.
        costs: learns the cost of prompt tokens.
        stored: KV in the tiers; None if there are none.
        trims_always: see ``PrefixCache``.
        adapters: the places of LoRA adapters; None if the runner has none.
        whole_pictures: all tokens of a picture are of one step, which may exceed ``max_step_tokens`` for it.
        blocks: see ``PrefixCache``.
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
        adapters: AdapterPlaces | None = None,
        whole_pictures: bool = False,
        blocks: HeldBlocks | None = None,
    ) -> None:
        self._whole_pictures = whole_pictures
        self.preemptions = 0
        self.costs = costs or PromptCosts()
        self._ended_works = works_at_lower_priority()[1]
        self.cache = PrefixCache(
            slots, enabled=prefix_cache, stored=stored, trims_always=trims_always, blocks=blocks
        )
        self.adapters = adapters or AdapterPlaces(0, lambda place, matrices: None)
        self._slots = slots
        self._max_step_tokens = max_step_tokens
        self._stretch = stretch
        self._served = VirtualCounters()
        self._waiting = WaitingQueue(self._served)
        self._running: list[Request] = []
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue, without a slot."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens that are still to be computed."""
        uncomputed = (request.num_tokens - request.num_computed for request in self._running)
        return self._waiting.tokens + sum(count for count in uncomputed if count > 1)

    def uncached_tokens(self, request: Request) -> int:
        """Return the tokens of a new request that neither a slot nor a tier has, and none is computing."""
        if request.num_tokens < _SHORT_PROMPT:
            return request.num_tokens
        match = self.cache.match(request)
        return request.num_tokens - max(match.length, match.known, self.cache.stored(request))

    def seconds_of_prompt(self, tokens: int) -> float | None:
        """Return the estimated seconds to compute a prompt here, beside what runs; None before any was."""
        streams = sum(request.streamed for request in self._running)
        return self.costs.seconds_beside(tokens, streams, self._stretch)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold a slot."""
        return tuple(self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self._served.join(request.tenant)
        self._waiting.push(request)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step: decode rows, then prompts in progress, then new requests."""
        draft = _Draft(whole_pictures=self._whole_pictures)
        self._grow_running()
        prefilling = []
        for request in self._running:
            uncomputed = request.num_tokens - request.num_computed
            if uncomputed == 0:
                continue  # its next token waits for a grammar
            if uncomputed == 1:
                draft.add(request, request.num_computed, 1)
            elif request.restorable > request.num_computed:
                draft.restoring.append(request)
            else:
                prefilling.append((request, request.num_computed))
        if prefilling or self._waiting.size:
            budget = self._add_prompts(draft, prefilling, admit=True)
            self._admit(draft, budget)
        if self._slots.state_tokens:
            for row, request in zip(draft.rows, draft.requests, strict=True):
                self.cache.keep_state(request, row.start)
                stop = row.start + len(row.tokens)
                row.checkpoints = [n for n in self._slots.checkpoints(row.slot) if n < stop]
        return draft.plan()

    def plan_ahead(self, flight: StepPlan) -> StepPlan | None:
        """Choose the rows of the step after ``flight``, which runs; None if that must be finished first.

        Rows of the tokens that the runner draws in the flight are placeholders. A request whose token only
        the host can draw has no row. Nothing is admitted, evicted or preempted, since slots are in use.
        """
        if self._waiting.size and self._slots.num_used < self._slots.num_slots:
            return None
        draft, prefilling, skipped = _Draft(whole_pictures=self._whole_pictures), [], 0
        places = {request: i for i, request in enumerate(flight.requests)}
        sampling = set(flight.sampling)
        for request in self._running:
            i, row, start = places.get(request), None, request.num_computed
            if i is not None:
                row = flight.rows[i]
                if row.start == start:  # otherwise it ran a wrong token
                    start += len(row.tokens)
            observed = request.pooling is not None or request.awaits_prompt_logprobs
            if (request.observes_prompt and observed) or request.restorable > start:
                return None
            if i is not None and row is not None and i in sampling and start == request.num_tokens:
                if request.remaining_tokens > 1:
                    if row.draw is None:
                        skipped += 1
                    else:
                        draft.add_placeholder(request, i)
            elif request.num_tokens - start == 1:
                draft.add(request, start, 1)
            elif start < request.num_tokens:
                prefilling.append((request, start))
        lengths, growth = list[int](), 0
        for row, request in zip(draft.rows, draft.requests, strict=True):
            lengths.append(request.num_tokens - request.num_dropped + (row.source is not None))
            growth += lengths[-1] - self._slots.held[row.slot]
        if 2 * skipped > len(flight.sampling) or not self._slots.fits(growth):
            return None
        for row, length in zip(draft.rows, lengths, strict=True):
            self._slots.grow(row.slot, length)
        if prefilling:
            self._add_prompts(draft, prefilling, admit=False)
        return draft.plan(ahead=True)

    def commit(self, plan: StepPlan) -> None:
        """Record that the plan's rows were computed."""
        for row, request, extra in zip(plan.rows, plan.requests, plan.proposed, strict=True):
            request.num_computed = row.start + len(row.tokens) - extra
            self.cache.computed(request)
            if self.cache.trims_always:
                self.cache.trim(request)
            self._served.charge(request.tenant, len(row.tokens) + OUTPUT_WEIGHT * (row.num_logits > 0))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn the cost of prompt tokens from a step's duration; steps with proposals are skipped.

        So are steps beside a tower, once the costs are known: they take longer than those behind it, and
        the pieces of the prompt with the picture would be larger by that.
        """
        (begun, ended), before = works_at_lower_priority(), self._ended_works
        self._ended_works = ended
        if any(plan.proposed) or (self.costs.known and (begun > ended or ended > before)):
            return
        prompts = tokens = 0
        for row in plan.rows:
            if (length := len(row.tokens)) > 1:
                prompts += 1
                tokens += length
        self.costs.observe(len(plan.rows) - prompts, prompts, tokens, seconds)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve KV of proposed tokens without preempting; return whether there is room."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        if not self.cache.make_room(num_tokens):
            return False
        self._slots.grow(request.slot, self._slots.tokens(request.slot) + num_tokens)
        return True

    def settle(self, plan: StepPlan, flight: StepPlan | None = None) -> None:
        """Keep the KV of accepted proposals, and free that of rejected ones and of rows that came to nothing.

        Args:
            plan: the step that was finished.
            flight: the step after it, whose rows need what they have reserved.
        """
        flying = set[Request]() if flight is None else {*flight.requests}
        for request, extra in zip(plan.requests, plan.proposed, strict=True):
            if request.slot is None or request in flying:
                continue
            if self._slots.held[request.slot] > request.num_kept:
                self._slots.grow(request.slot, request.num_computed - request.num_dropped)
            if extra and self.cache.trims_always:
                self.cache.trim(request)

    def remove(self, request: Request, *, keep: bool = True) -> None:
        """Remove a request, finished or not; ``keep`` its KV for the prefix cache."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self.cache.leave(request, keep=keep)
            self.adapters.leave(request)
        self._served.leave(request.tenant)

    def preempt(self, request: Request, *, keep: bool = True) -> None:
        """Preempt a running request: it loses its slot, waits again, and is recomputed or restored later."""
        self._running.remove(request)
        self.cache.leave(request, keep=keep)
        self.adapters.leave(request)
        request.num_computed = request.num_dropped = 0
        request.status = RequestStatus.WAITING
        request.resumes, request.stored, request.restorable, request.restored = True, None, 0, 0
        self._waiting.push(request)
        self.preemptions += 1

    def drop(self, request: Request, num_tokens: int) -> None:
        """Record that KV of ``num_tokens`` tokens of a running request was evicted for good."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        request.num_dropped += num_tokens
        self._slots.grow(request.slot, self._slots.tokens(request.slot) - num_tokens)
        self.cache.exclude(request)

    def restart(self, request: Request) -> None:
        """Record that the tokens of a running request have changed from ``num_computed`` on."""
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        self._slots.grow(request.slot, request.num_tokens)
        self.cache.replace(request)

    def invalidate(self, slot: int) -> None:
        """Drop a slot whose content was lost; its request, if any, is preempted and recomputed."""
        for request in self.running:
            if request.slot == slot:
                self.preempt(request, keep=False)
        if self._slots.is_idle(slot):
            self.cache.evict(slot, save=False)

    def shrink(self, tokens: int) -> None:
        """Let later steps have half of ``tokens``, which needed too much memory; at least one a slot."""
        most = max(self._slots.num_slots, tokens // 2)
        if most < self._max_step_tokens:
            _log.warning("memory is short: steps have at most %d tokens from now on", most)
            self._max_step_tokens = most

    def check_integrity(self, flight: StepPlan | None = None) -> None:
        """Check that requests and slots are consistent.

        Args:
            flight: the step in flight; its requests may hold room for one more token.

        Raises:
            RuntimeError: they are not; the message shows the difference.
        """
        self._slots.check_integrity()
        self.cache.check_integrity()
        self.adapters.check_integrity(self._running)
        slots = [request.slot for request in self._running]
        if None in slots or len(set(slots)) != len(slots) or len(slots) != self._slots.num_used:
            raise RuntimeError(f"{self._slots.num_used} slots are in use, running requests hold {slots}")
        for request in self._running:
            assert request.slot is not None  # noqa: S101 -- checked above
            held = self._slots.tokens(request.slot)
            if request in self._waiting or request.status is not RequestStatus.RUNNING:
                raise RuntimeError(f"{request} holds a slot, but is queued or not in status RUNNING")
            most = request.num_tokens + (flight is not None and request in flight.requests)
            if not request.num_computed <= held + request.num_dropped <= most:
                raise RuntimeError(f"{request} has {request.num_computed} computed tokens, its slot {held}")

    def _grow_running(self) -> None:
        """Reserve KV for the newest token of each running request; preempt the youngest if that fails."""
        growth = 0
        for request in self._running:
            if request.slot is not None:
                growth += request.num_tokens - request.num_dropped - self._slots.held[request.slot]
        if self._slots.fits(growth):
            for request in self._running:
                if request.slot is not None:
                    self._slots.grow(request.slot, request.num_tokens - request.num_dropped)
            return
        for request in sorted(self._running, key=lambda r: r.order):
            while request.slot is not None and not self.cache.make_room(self._growth(request)):
                self.preempt(max(self._running, key=lambda r: r.order))
            if request.slot is not None:
                self._slots.grow(request.slot, request.num_kept)

    def _growth(self, request: Request) -> int:
        assert request.slot is not None  # noqa: S101 -- only called for running requests
        return request.num_kept - self._slots.tokens(request.slot)

    def _add_prompts(self, draft: _Draft, prefilling: Sequence[tuple[Request, int]], *, admit: bool) -> int:
        """Add rows of prompts in progress, each from a token on; return the budget of prompt tokens left."""
        budget = self._prompt_budget(draft, [request for request, _ in prefilling])
        for request, start in sorted(prefilling, key=lambda part: self._serving_order(part[0])):
            if admit:
                budget = self._admit(draft, budget, before=request)
            if budget > 0:
                budget -= draft.add(request, start, min(request.num_tokens - start, budget))
        return budget

    def _prompt_budget(self, draft: _Draft, prefilling: Sequence[Request]) -> int:
        """Return the number of prompt tokens of a step with the plan's decode rows, limited by ``stretch``.

        The limit grows with the requests that wait for their first token: with their share of all requests if
        there are several, and with their number for each stream if there are more of them than streams.
        """
        rows = len(draft.rows)
        most = self._max_step_tokens - rows
        if not (prefilling or len(self._waiting)) or self._stretch == float("inf"):
            return most
        if not any(request.streamed for request in draft.requests):
            return most
        starting = len(prefilling) + min(len(self._waiting), self._slots.num_slots - self._slots.num_used)
        backlog = _BACKLOG * (starting - 1) / (starting + rows)
        added = self._stretch - 1.0
        if prefilling and all(request.images is not None for request in prefilling):
            added *= _PICTURES
        stretch = 1.0 + added * max(1.0, starting / rows, backlog)
        affordable = self.costs.prompt_tokens(rows, stretch)
        return most if affordable is None else min(most, affordable)

    def _serving_order(self, request: Request) -> tuple[int, float, int]:
        """Return the sort key of requests whose prompts compete for a step's tokens."""
        return request.priority, self._served.served(request.tenant), request.arrival_index

    def _admit(self, draft: _Draft, budget: int, before: Request | None = None) -> int:
        """Admit waiting requests within the token budget; return the budget left.

        With ``before``, admit only requests that are served before that one.
        """
        while budget > 0 and self._slots.num_used < self._slots.num_slots:
            head = self._waiting.first(1)
            if head and before is not None and self._serving_order(head[0]) > self._serving_order(before):
                break
            chosen = self._choose() if head else None
            # Reserve one token for each request; otherwise the next step could preempt a new one at once.
            headroom = len(self._running) + 1 if self._running else 0
            if chosen is None or not self.cache.place(*chosen, headroom):
                break
            request, match = chosen
            head[0].overtaken += request is not head[0]
            self._waiting.remove(request)
            self._served.chosen(request.tenant)
            self._start(request, match)
            if request.restorable:
                draft.restoring.append(request)
                continue
            budget -= draft.add(request, request.num_computed, min(request.num_uncomputed, budget))
        return budget

    def _choose(self) -> tuple[Request, PrefixMatch] | None:
        """Return the request to admit: of the first few, the one with the longest cached prefix.

        A request whose prefix is being computed by another waits for it, but is overtaken at most
        ``_MAX_OVERTAKES`` times. So does a request whose adapter finds no place. A preempted request is never
        overtaken.
        """
        ahead = self.cache.enabled or self.adapters.in_use
        candidates = self._waiting.first(_LOOKAHEAD if ahead else 1)
        head = candidates[0]
        if head.resumes or head.overtaken >= _MAX_OVERTAKES:
            return (head, self.cache.match(head)) if self.adapters.has_place(head) else None
        best, longest = None, -1
        for request in candidates:
            if not self.adapters.has_place(request):
                continue
            match = self.cache.match(request)
            length = max(match.length, self.cache.stored(request))
            awaited = match.known - length >= _MIN_AWAITED_PREFIX
            if length > longest and not awaited:
                best, longest = (request, match), length
        return best

    def _start(self, request: Request, match: PrefixMatch) -> None:
        request.status = RequestStatus.RUNNING
        request.resumes = False
        self.adapters.take(request)
        if request.metrics.first_scheduled is None:
            request.metrics.first_scheduled = time.monotonic()
            request.metrics.cached_tokens = match.length
        self._running.append(request)
