"""A step after it is planned: run its rows, find rows at fault, and sample their tokens."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from ...errors import OutOfMemoryError, ProviderRuntimeError
from ...providers.base import BestLogits, Pending, Row, Runner
from ...records import dataclass
from .kv.slots import Operation
from .requests.request import Request
from .sampling.sampler import (
    NO_TOKEN,
    BatchLogitsProcessor,
    Sample,
    best_may_suffice,
    is_wanted,
    sample,
)
from .sampling.sampling_state import SamplingState
from .schedule.scheduler import StepPlan

_log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32] | BestLogits

_LOSSES = 2  # runs that lost the KV of a request, since its last token, before it fails
_PATIENCE = 0.01  # seconds that a step waits for masks of grammars after the model has run


@dataclass(slots=True)
class RunCounters:
    """Running totals; see ``EngineStats``."""

    steps: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class Step:
    """A plan that was given to the runner.

    Args:
        plan: its rows.
        begun: when it was given, in seconds of ``time.perf_counter``.
        pending: its result; None if it has no rows, or failed at once.
        fault: why it failed at once.
        frees: operations on slots that wait for its end, since it was planned before them.
    """

    plan: StepPlan
    begun: float = 0.0
    pending: Pending[list[Logits]] | None = None
    fault: ProviderRuntimeError | None = None
    frees: list[Operation] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of running a plan.

    Args:
        plan: the rows that were computed.
        logits: per row of ``plan``.
        faults: requests whose rows failed, with the errors.
        lost: slots whose KV was lost in a run that failed; their requests can be computed again.
        seconds: duration of the run; None if nothing ran, or rows ran one by one.
        too_many: tokens of the smallest run that needed too much memory; 0 if none did.
    """

    plan: StepPlan
    logits: list[Logits] = field(default_factory=list)
    faults: list[tuple[Request, ProviderRuntimeError]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    seconds: float | None = None
    too_many: int = 0


class PlanRunner:
    """Run plans on a runner: ``submit`` one, and ``finish`` it, before or after the next is submitted.

    Args:
        runner: holds the model.
        processors: batch logits processors; they decide which rows need all logits.
        reads_states: whether a proposer reads hidden states of a request's row that ends at a position;
            None if there is no such proposer.

    Attributes:
        flight: the step that was submitted while another was in flight; None if there is none.
    """

    def __init__(
        self,
        runner: Runner,
        processors: Sequence[BatchLogitsProcessor],
        reads_states: Callable[[Request, int], bool] | None = None,
    ) -> None:
        self.counters = RunCounters()
        self.flight: Step | None = None
        self._runner = runner
        self._processors = processors
        self._reads_states = reads_states
        self._finished = 0.0  # when the last step was

    def submit(self, plan: StepPlan) -> Step:
        """Give all rows of a plan to the runner, together."""
        if not plan.rows:
            return Step(plan)
        if plan.observed or self._reads_states is not None:
            for row, request in zip(plan.rows, plan.requests, strict=True):
                if self._wants_states(request, row.start + len(row.tokens)):
                    shape = len(row.tokens), self._runner.info.hidden_width
                    row.last_hidden_states = np.empty(shape, np.float32)
        if self._runner.info.top_logits or self._runner.info.steps_ahead:
            self._let_device_draw(plan)
        self.counters.steps += 1
        begun = time.perf_counter()
        try:
            return Step(plan, begun, self._runner.submit(plan.rows))
        except ProviderRuntimeError as error:
            return Step(plan, begun, fault=error)

    def _wants_states(self, request: Request, stop: int) -> bool:
        """Whether an embedding or a proposer needs hidden states of a row that ends at ``stop``."""
        if request.pooling is not None:
            return request.wants_hidden_states(stop)
        return self._reads_states is not None and self._reads_states(request, stop)

    def finish(self, step: Step) -> StepResult:
        """Wait for a step; if it failed, leave out rows whose KV was lost, and run each other row alone.

        Of a step that was planned ahead, rows are left out that ended meanwhile or ran a wrong token.
        """
        plan = step.plan
        if step.pending is None and step.fault is None:
            return StepResult(plan)
        try:
            logits = self._waited(step)
        except ProviderRuntimeError as error:
            step.frees += self.drop_flight()  # it depends on this step
            return self._run_one_by_one(plan, error)
        now = time.perf_counter()
        seconds, self._finished = now - max(step.begun, self._finished), now
        for row in plan.rows:
            self.counters.computed_tokens += len(row.tokens)
        if plan.ahead and (wrong := _outdated(plan, ran=True)):
            logits = [row_logits for i, row_logits in enumerate(logits) if i not in wrong]
            plan = plan.without(wrong)
        return StepResult(plan, logits, seconds=seconds)

    def drop_flight(self) -> list[Operation]:
        """Wait for the step in flight and forget its result; return the operations that waited for it."""
        step, self.flight = self.flight, None
        if step is None:
            return []
        with contextlib.suppress(ProviderRuntimeError):
            self._waited(step)
        return step.frees

    @staticmethod
    def _waited(step: Step) -> list[Logits]:
        if step.pending is None:
            raise step.fault or ProviderRuntimeError("the step was not submitted")
        return step.pending.wait()

    def _let_device_draw(self, plan: StepPlan) -> None:
        """Ask for the largest logits only, and for a drawn token, in rows where these may be enough."""
        info = self._runner.info
        for i in plan.sampling:
            row, request = plan.rows[i], plan.requests[i]
            if row.num_logits != 1:
                continue
            if self._processors and any(is_wanted(p, request.sampling) for p in self._processors):
                continue
            if info.top_logits and not (request.observes_prompt and request.awaits_prompt_logprobs):
                row.best_suffice = best_may_suffice(request.sampling, info.top_logits)
            if info.steps_ahead:
                row.draw = request.sampling.draw(ahead=int(row.source is not None))

    def _run_one_by_one(self, plan: StepPlan, error: ProviderRuntimeError) -> StepResult:
        """Run each row alone and without proposed tokens, to find the rows at fault.

        If the runner lost KV, a process or a host may be at fault and not a row: requests with that KV are
        left to be computed again, unless that was tried.
        """
        lost = {*self._runner.take_lost()}
        again = {
            i for i, row in enumerate(plan.rows) if row.slot in lost and plan.requests[i].losses < _LOSSES
        }
        for i in again:
            plan.requests[i].losses += 1
        retry = len(plan.rows) > 1 or any(plan.proposed) or plan.ahead
        # Without a retry this is the error of the only request, which its caller gets.
        level = logging.WARNING if retry or again else logging.INFO
        _log.log(level, "a step of %d rows failed: %s", len(plan.rows), error)
        too_many = sum(len(row.tokens) for row in plan.rows) * isinstance(error, OutOfMemoryError)
        plan = plan.without(again | _outdated(plan, ran=False)).known()
        logits: list[Logits] = []
        faults: dict[int, ProviderRuntimeError] = {}
        later: set[int] = set()  # rows that are computed in a later step
        for i, row in enumerate(plan.rows):
            outcome = self._run_row(row) if retry else error
            if not isinstance(outcome, ProviderRuntimeError):
                logits.append(outcome)
                continue
            if isinstance(outcome, OutOfMemoryError):
                too_many = min(too_many or len(row.tokens), len(row.tokens))
                if self._puts_off(row, plan.requests[i], lost):
                    later.add(i)
                    continue
            faults[i] = outcome
        failed = [(plan.requests[i], fault) for i, fault in faults.items()]
        return StepResult(plan.without(later | faults.keys()), logits, failed, lost, too_many=too_many)

    def _puts_off(self, row: Row, request: Request, lost: set[int]) -> bool:
        """Whether a row that alone needs too much memory is computed later: in smaller parts, or preempted.

        Args:
            row: the row.
            request: its request.
            lost: slots whose requests are preempted; the row's is added if it cannot be smaller.
        """
        tokens = len(row.tokens)
        if tokens > self._runner.info.max_slots and not 0 < request.refused <= tokens:
            request.refused = tokens
            return True
        if request.losses >= _LOSSES:
            return False
        request.losses += 1
        lost.add(row.slot)
        return True

    def _run_row(self, row: Row) -> Logits | ProviderRuntimeError:
        try:
            logits = self._runner.forward([row])[0].copy()  # the next run overwrites the original
        except ProviderRuntimeError as error:
            return error
        self.counters.computed_tokens += len(row.tokens)
        return logits


def _outdated(plan: StepPlan, *, ran: bool) -> set[int]:
    """Return the rows of a plan made ahead whose request has ended since, or does not continue there.

    With ``ran``, also those that ran another token than the request has: the runner drew it differently.
    """
    outdated = set()
    for i, (row, request) in enumerate(zip(plan.rows, plan.requests, strict=True)):
        ended = request.slot != row.slot or request.num_computed != row.start
        drawn = ran and row.source is not None
        if ended or (drawn and row.tokens[0] != request.token_slice(row.start, row.start + 1)[0]):
            outdated.add(i)
    return outdated


def observe_prompts(plan: StepPlan, logits: Sequence[Logits], embedding_size: int) -> list[Request]:
    """Pass prompt logits and hidden states to the requests that want them; return finished requests.

    Embeddings are pooled from the first ``embedding_size`` columns of hidden states.
    """
    ended = []
    for row, request, row_logits in zip(plan.rows, plan.requests, logits, strict=True):
        if request.awaits_prompt_logprobs and not isinstance(row_logits, BestLogits) and len(row_logits):
            request.observe_prompt(row.start + len(row.tokens) - len(row_logits), row_logits)
        if row.last_hidden_states is not None and request.pooling is not None:
            request.observe_hidden_states(row.start, row.last_hidden_states[:, :embedding_size])
            if request.finished:
                ended.append(request)
    return ended


class StepSampler:
    """Sample the next tokens of a step's rows.

    A request whose grammar has no mask in time is set aside with its logits: it keeps its slot and has no
    row in the steps until the mask is there.

    Args:
        processors: change the logits of whole batches.
        take: appends a token to its request, which may finish the request.

    Attributes:
        late: the requests set aside, with their logits [vocab_size].
    """

    def __init__(
        self, processors: Sequence[BatchLogitsProcessor], take: Callable[[Request, Sample], None]
    ) -> None:
        self._processors = processors
        self._take = take
        self.late: dict[Request, npt.NDArray[np.float32]] = {}

    def sample(self, plan: StepPlan, logits: Sequence[Logits]) -> list[int]:
        """Sample the next token of the plan's sampling rows, and more while they equal the proposed tokens.

        Every token is sampled as without proposals, so proposals change neither greedy nor seeded results.

        Args:
            plan: the plan that was run.
            logits: per row of the plan.

        Returns:
            Per row, the number of accepted proposed tokens.
        """
        accepted = [0] * len(plan.rows)
        # A row with proposals has logits of several positions. Its requests may accept some of them, so the
        # rows are sampled in rounds: each round draws one token of every row whose last token was proposed.
        rows: Sequence[int] = plan.sampling
        if any(plan.proposed):
            rows = [i for i in plan.sampling if not self._take_most_likely(plan, i, logits[i], accepted)]
        while rows:
            drawn = self._sample_round(plan, logits, rows, accepted)
            if not any(plan.proposed):
                break
            rows = [
                i
                for i, token in drawn
                if plan.proposed[i] and not plan.requests[i].finished and plan.accepts(i, accepted[i], token)
            ]
            for i in rows:
                accepted[i] += 1
                plan.requests[i].num_computed += 1
        return accepted

    def sample_late(self, *, patient: bool) -> list[Request]:
        """Sample for the requests set aside whose masks are ready; return these requests.

        Args:
            patient: wait up to 10 ms, because no row runs.
        """
        # A finished request is forgotten. A request without a slot is computed again and gets new logits.
        self.late = {request: logits for request, logits in self.late.items() if _waits(request)}
        until = time.monotonic() + (_PATIENCE if patient else 0.0)
        ready = [request for request in self.late if request.can_draw(until - time.monotonic())]
        logits = [self.late.pop(request) for request in ready]
        samples = sample(logits, [request.sampling for request in ready], self._processors)
        for request, token in zip(ready, samples, strict=True):
            self._take(request, token)
        return ready

    def _sample_round(
        self, plan: StepPlan, logits: Sequence[Logits], rows: Sequence[int], accepted: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Sample and take one token of each row; return (row, token) of those whose grammar was ready."""
        until = time.monotonic() + _PATIENCE
        ready: list[int] = []
        places: list[Logits] = []
        states: list[SamplingState] = []
        tokens: list[tuple[int, int]] = []
        for i in rows:
            request, place = plan.requests[i], logits[i]
            if not isinstance(place, BestLogits):
                place = place[accepted[i] - plan.proposed[i] - 1]
            if request.grammar is not None and not request.can_draw(until - time.monotonic()):
                self._set_aside(request, place)
                continue
            ready.append(i)
            places.append(place)
            states.append(request.sampling)
        for i, drawn in zip(ready, sample(places, states, self._processors), strict=True):
            self._take(plan.requests[i], drawn)
            tokens.append((i, drawn.token_id))
        return tokens

    def _set_aside(self, request: Request, logits: Logits) -> None:
        """Keep all logits of a request, which the next run overwrites, until its grammar has a mask."""
        try:
            whole = logits.whole() if isinstance(logits, BestLogits) else logits
        except ProviderRuntimeError as error:
            self._take(request, Sample(NO_TOKEN, error=str(error)))
            return
        self.late[request] = whole.copy()

    def _take_most_likely(self, plan: StepPlan, index: int, logits: Logits, accepted: list[int]) -> bool:
        """Verify all proposed tokens of a row by one argmax; False unless greedy sampling needs no more."""
        extra, request = plan.proposed[index], plan.requests[index]
        state = request.sampling
        if not extra or not state.takes_most_likely or isinstance(logits, BestLogits):
            return False
        if any(is_wanted(processor, state) for processor in self._processors):
            return False
        places = logits[-extra - 1 :]
        tokens = places.argmax(axis=1)
        if not np.isfinite(places[np.arange(extra + 1), tokens]).all():
            return False
        for position, token in enumerate(tokens.tolist()):
            self._take(request, Sample(token))
            if request.finished or not plan.accepts(index, position, token):
                break
            request.num_computed += 1
            accepted[index] += 1
        return True


def _waits(request: Request) -> bool:
    return not request.finished and request.slot is not None and request.num_uncomputed == 0
