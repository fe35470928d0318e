"""Run a plan on the runner; if that fails, find the rows at fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ...providers.base import BestLogits, Row, Runner
from .best_logits import forward
from .requests.request import Request
from .sampling.sampler import BatchLogitsProcessor
from .schedule.scheduler import StepPlan

_log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32] | BestLogits


@dataclass(slots=True)
class RunCounters:
    """Running totals; see ``EngineStats``."""

    steps: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of running a plan.

    Args:
        plan: the rows that were computed.
        logits: per row of ``plan``.
        faults: requests whose rows failed, with the errors.
        seconds: duration of the run; None if nothing ran, or rows ran one by one.
    """

    plan: StepPlan
    logits: list[Logits] = field(default_factory=list)
    faults: list[tuple[Request, ProviderRuntimeError]] = field(default_factory=list)
    seconds: float | None = None


class PlanRunner:
    """Run plans on a runner.

    Args:
        runner: holds the model.
        processors: batch logits processors; they decide which rows need all logits.
    """

    def __init__(self, runner: Runner, processors: Sequence[BatchLogitsProcessor]) -> None:
        self.counters = RunCounters()
        self._runner = runner
        self._processors = processors

    def run(self, plan: StepPlan) -> StepResult:
        """Run all rows together; if that fails, run each row alone."""
        if not plan.rows:
            return StepResult(plan)
        for row, request in zip(plan.rows, plan.requests, strict=True):
            if request.wants_hidden_states(row.start + len(row.tokens)):
                shape = len(row.tokens), self._runner.info.embedding_size
                row.last_hidden_states = np.empty(shape, np.float32)
        self.counters.steps += 1
        start = time.perf_counter()
        try:
            logits = forward(self._runner, plan, self._processors)
        except ProviderRuntimeError as error:
            return self._run_one_by_one(plan, error)
        seconds = time.perf_counter() - start
        self.counters.computed_tokens += sum(len(row.tokens) for row in plan.rows)
        return StepResult(plan, logits, seconds=seconds)

    def _run_one_by_one(self, plan: StepPlan, error: ProviderRuntimeError) -> StepResult:
        """Run each row alone and without proposed tokens, to find the rows at fault."""
        retry = len(plan.rows) > 1 or any(plan.proposed)
        # Without a retry this is the error of the only request, which its caller gets.
        _log.log(
            logging.WARNING if retry else logging.INFO, "a step of %d rows failed: %s", len(plan.rows), error
        )
        logits: list[Logits] = []
        faults: dict[int, ProviderRuntimeError] = {}
        plan.remove_proposals()
        for i, row in enumerate(plan.rows):
            outcome = self._run_row(row) if retry else error
            if isinstance(outcome, ProviderRuntimeError):
                faults[i] = outcome
            else:
                logits.append(outcome)
        return StepResult(
            plan.without(faults), logits, [(plan.requests[i], fault) for i, fault in faults.items()]
        )

    def _run_row(self, row: Row) -> Logits | ProviderRuntimeError:
        try:
            logits = self._runner.forward([row])[0].copy()  # the next run overwrites the original
        except ProviderRuntimeError as error:
            return error
        self.counters.computed_tokens += len(row.tokens)
        return logits
