"""Continuous batching: many requests, one runner, one step at a time."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from ...providers.base import BestLogits, Row, Runner, TrimmingRunner
from ..errors import (
    CarryallError,
    ProviderRuntimeError,
    QueueFullError,
    RequestError,
    UsageError,
)
from .admission import checked_room
from .compiling import CompilingRequests
from .config import EngineConfig as EngineConfig
from .deadlines import Deadlines
from .draw_best import forward, place, sample_rows
from .endless import EndlessText
from .kv_tiers.chunk import Tier
from .kv_tiers.mover import KVMover, make_tier
from .prompt_costs import PromptCosts
from .request import Request
from .sampler import NO_TOKEN, Sample
from .scheduler import Scheduler, StepPlan
from .slots import Release, Save, SlotTable
from .speculation.forced_tokens import ForcedTokens
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator
from .stats import Counters, EngineStats

_log = logging.getLogger(__name__)

_NOTHING_TO_DRAW = (
    "no token can be drawn: the logits are not finite numbers, or the options forbid all tokens"
)

# Seconds a step may spend on bringing KV back, beside running streams and without them.
_RESTORE_BESIDE, _RESTORE_ALONE = 0.02, 0.2
_UNLIMITED = 2**31 - 1
_TRIM_EVERY = 256  # tokens

Logits = npt.NDArray[np.float32] | BestLogits


class Engine:
    """Requests in, tokens out. Not thread-safe: one thread at a time may use it.

    Args:
        runner: holds the model and the KV cache; the engine closes it.
        config: how to schedule.
        proposer: proposes tokens to check several at a time; the engine closes it.

    Attributes:
        clock: tells speculation what steps cost, in seconds.
        identity: changes whenever the model does; KV kept on disk is found by it.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig | None = None,
        proposer: Proposer | None = None,
        identity: str = "",
    ) -> None:
        self.config = config or EngineConfig()
        self.info = info = runner.info
        if self.config.max_step_tokens < info.max_slots:
            raise UsageError(
                f"max_step_tokens {self.config.max_step_tokens} is less than the {info.max_slots} slots, "
                "each of which needs a token a step; raise it or lower max_slots"
            )
        kv_tokens = None
        if self.config.kv_bytes is not None:
            kv_tokens = self.config.kv_bytes // max(1, info.kv_bytes_per_token)
        # The last token generated needs no KV.
        self.max_length = (
            info.context_length if kv_tokens is None else min(info.context_length, kv_tokens + 1)
        )
        self._runner = runner
        self._slots = SlotTable(info.max_slots, kv_tokens)
        costs = PromptCosts()
        self._mover = KVMover(runner, self._tier(identity), identity, costs)
        self._scheduler = Scheduler(
            self._slots,
            self.config.max_step_tokens,
            prefix_cache=self.config.prefix_cache,
            stretch=self.config.step_stretch,
            costs=costs,
            stored=self._mover if self._mover.active else None,
        )
        self.clock: Callable[[], float] = time.perf_counter
        self._speculator = Speculator(
            [ForcedTokens(), *([proposer] if proposer is not None else [])],
            batched=info.batched_multi_token,
            max_step_tokens=self.config.max_step_tokens,
            adaptive=self.config.adaptive_speculation,
        )
        self._requests: dict[str, Request] = {}
        # What is given back is missed by whoever begins alike, or begins again.
        self._trims = info.sliding_window > 0 and not self.config.prefix_cache
        self._trims &= self.config.context_overflow == "length"
        self._endless: EndlessText | None = None
        if self.config.context_overflow == "slide":
            self._endless = EndlessText(
                self.max_length, self.config.attention_sinks, self._scheduler, self._speculator
            )
        self._deadlines = Deadlines()
        self._compiling = CompilingRequests(self.config.compile_seconds)
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request, whose ``max_tokens`` is lowered to the room that the context leaves.

        Raises:
            PromptTooLongError: it can never fit.
            RequestError: the prompt is empty, names tokens that do not exist, or the id is in use.
            QueueFullError: too many wait already.
        """
        limit = self.config.max_queue
        if limit is not None and len(self._requests) >= self.info.max_slots + limit:
            raise QueueFullError(f"all slots are taken and {limit} requests are waiting; retry later")
        if request.request_id in self._requests:
            raise RequestError(f"request id '{request.request_id}' is in use; ids must be unique")
        room = checked_room(request, self.info, self.max_length)
        if self._endless is None:
            request.max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        else:
            request.max_tokens = _UNLIMITED if request.max_tokens is None else request.max_tokens
            request.capacity = self.max_length
        self._requests[request.request_id] = request
        self._counters.prompt_tokens += request.num_tokens
        self._deadlines.add(request)
        if request.awaited_grammar is None:
            self._scheduler.add(request)
        else:
            self._compiling.add(request)

    def cancel(self, request_id: str) -> Request | None:
        """End a request now, with finish_reason "cancelled"; None if it is not in the engine."""
        request = self._requests.get(request_id)
        if request is not None:
            self._cancel(request)
            self._apply_operations()
        return request

    def clear_prefix_cache(self) -> None:
        """Give back the memory of everything that finished requests left behind."""
        self._scheduler.cache.clear()
        self._apply_operations()

    def step(self) -> list[Request]:
        """Run one step; return the requests that gained tokens or ended."""
        expired = self._expire()
        refused = self._take_compiled()
        begin = self.clock()
        plan = self._prepare(self._scheduler.plan())
        plan, logits, failed = self._forward(plan)
        self._scheduler.commit(plan)
        if self._trims:
            self._trim(plan)
        _observe_prompts(plan, logits)
        drawing = plan.drawing()
        accepted = self._draw(plan, logits, drawing)
        self._scheduler.settle(plan)
        if self._endless is not None:
            self._endless.slide(plan.requests)
        self._speculator.learn(plan, accepted, self.clock() - begin)
        self._apply_operations()
        return expired + refused + failed + [plan.requests[i] for i in drawing]

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        held = self._slots.used_tokens + self._slots.idle_tokens
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting + len(self._compiling),
            slots=self._slots.num_slots,
            kv_tokens=held,
            idle_kv_tokens=self._slots.idle_tokens,
            kv_bytes=held * self.info.kv_bytes_per_token,
            kv_bytes_budget=self.config.kv_bytes,
            preemptions=self._scheduler.preemptions,
            **dataclasses.asdict(self._counters),
            **dataclasses.asdict(self._scheduler.cache.counters),
            **dataclasses.asdict(self._mover.counters),
            **dataclasses.asdict(self._speculator.counters),
        )

    def check_integrity(self) -> None:
        """Check that requests, queue and slots agree.

        Raises:
            RuntimeError: they do not; the message says how.
        """
        self._scheduler.check_integrity()
        held = len(self._scheduler.running) + self._scheduler.num_waiting + len(self._compiling)
        if held != len(self._requests):
            raise RuntimeError(f"{len(self._requests)} requests are unfinished, the scheduler holds {held}")

    def close(self) -> list[Request]:
        """Cancel everything and free the runner; return the requests that were cut off."""
        cut = [request for request_id in list(self._requests) if (request := self.cancel(request_id))]
        self._scheduler.cache.clear(save=True)
        self._apply_operations()
        self._mover.close()
        self._runner.close()
        self._speculator.close()
        return cut

    def _trim(self, plan: StepPlan) -> None:
        """Let layers with a sliding window forget what lies behind it, now and then."""
        for row, request in zip(plan.rows, plan.requests, strict=True):
            if request.num_computed // _TRIM_EVERY > row.start // _TRIM_EVERY:
                cast(TrimmingRunner, self._runner).trim(row.slot, request.num_computed)

    def _tier(self, identity: str) -> Tier | None:
        """What the options ask for to keep KV in outside of the runner."""
        config = self.config
        folder = None if config.prefix_cache_dir is None else Path(config.prefix_cache_dir)
        if folder is not None and not identity:
            raise UsageError("prefix_cache_dir needs to know the model: load it with LLM, or give identity")
        return make_tier(folder, config.prefix_cache_bytes, config.swap_bytes, self.info.kv_layout)

    def _cancel(self, request: Request, why: str | None = None) -> None:
        request.finish("cancelled", why)
        self._counters.cancelled += 1
        self._retire(request)

    def _expire(self) -> list[Request]:
        """End the requests whose deadline has passed, wherever they stand."""
        expired = [request for request in self._deadlines.take(time.monotonic()) if not request.finished]
        for request in expired:
            self._cancel(request, "deadline")
        return expired

    def _forward(self, plan: StepPlan) -> tuple[StepPlan, list[Logits], list[Request]]:
        """Run the plan; return what of it was computed, its logits, and the requests that failed."""
        if not plan.rows:
            return plan, [], []
        self._counters.steps += 1
        start = time.perf_counter()
        try:
            logits = forward(self._runner, plan, self.config.logits_processors)
        except ProviderRuntimeError as error:
            return self._forward_one_by_one(plan, error)
        self._scheduler.learn(plan, time.perf_counter() - start)
        self._counters.computed_tokens += sum(len(row.tokens) for row in plan.rows)
        return plan, logits, []

    def _forward_one_by_one(
        self, plan: StepPlan, error: ProviderRuntimeError
    ) -> tuple[StepPlan, list[Logits], list[Request]]:
        """Find the rows at fault by running each alone, without proposals; only their requests fail."""
        _log.warning("a step of %d rows failed: %s", len(plan.rows), error)
        logits: list[Logits] = []
        failed: dict[int, ProviderRuntimeError] = {}
        retry = len(plan.rows) > 1 or any(plan.proposed)
        plan.withdraw()
        for i, row in enumerate(plan.rows):
            outcome = self._forward_row(row) if retry else error
            if isinstance(outcome, ProviderRuntimeError):
                failed[i] = outcome
            else:
                logits.append(outcome)
        for i, fault in failed.items():
            self._fail(plan.requests[i], fault)
        return plan.without(failed), logits, [plan.requests[i] for i in failed]

    def _forward_row(self, row: Row) -> Logits | ProviderRuntimeError:
        try:
            logits = self._runner.forward([row])[0].copy()  # the next run overwrites the original
        except ProviderRuntimeError as error:
            return error
        self._counters.computed_tokens += len(row.tokens)
        return logits

    def _draw(self, plan: StepPlan, logits: list[Logits], drawing: list[int]) -> list[int]:
        """Draw the next token of the ``drawing`` rows, and another while the last was the one proposed.

        Every token is drawn as it would be without proposals, so these change no result: neither the most
        likely token, nor the one that a seed leads to.

        Returns:
            Per row, how many of the proposed tokens were drawn.
        """
        accepted = [0] * len(plan.rows)
        while drawing:
            requests = [plan.requests[i] for i in drawing]
            places = [place(logits[i], accepted[i] - plan.proposed[i] - 1) for i in drawing]
            states = [request.sampling for request in requests]
            samples = sample_rows(places, states, self.config.logits_processors)
            self._append(requests, samples)
            drawing = [
                i
                for i, drawn in zip(drawing, samples, strict=True)
                if not plan.requests[i].finished and plan.accepts(i, accepted[i], drawn.token_id)
            ]
            for i in drawing:
                accepted[i] += 1
                plan.requests[i].num_computed += 1
        return accepted

    def _append(self, requests: list[Request], samples: list[Sample]) -> None:
        for request, chosen in zip(requests, samples, strict=True):
            if chosen.token_id == NO_TOKEN:
                why = request.draw_error or chosen.error or _NOTHING_TO_DRAW
                self._fail(request, ProviderRuntimeError(why))
                continue
            request.append(chosen)
            self._counters.generated_tokens += 1
            if request.finished:
                self._counters.finished += 1
                self._retire(request)

    def _take_compiled(self) -> list[Request]:
        """Queue requests whose grammar is ready; return those whose grammar is refused."""
        if not self._compiling:
            return []
        if len(self._compiling) == len(self._requests):
            self._compiling.pause()  # there is nothing else to do
        ready, refused = self._compiling.take()
        for request in ready:
            self._scheduler.add(request)
        for request in refused:
            self._fail(request, request.fault)
        return refused

    def _fail(self, request: Request, error: CarryallError | None) -> None:
        request.finish("error", error=str(error))
        self._counters.failed += 1
        self._retire(request, keep=False)

    def _retire(self, request: Request, *, keep: bool = True) -> None:
        del self._requests[request.request_id]
        self._speculator.forget(request)
        if not self._compiling.discard(request):
            self._scheduler.remove(request, keep=keep)

    def _prepare(self, plan: StepPlan) -> StepPlan:
        """Move KV to where the plan expects it; return the plan without the rows for which that failed."""
        lost = self._apply_operations()
        for slot in lost:
            self._scheduler.lose(slot)
        if lost:
            plan = plan.without([i for i, row in enumerate(plan.rows) if row.slot in lost])
        self._mover.restore(plan.restoring, _RESTORE_BESIDE if plan.rows else _RESTORE_ALONE)
        for request in plan.restoring:
            self._scheduler.cache.progress(request)
        self._speculator.lengthen(plan, self._scheduler)
        for i in plan.drawing():
            plan.requests[i].prepare_draw()
        return plan

    def _apply_operations(self) -> set[int]:
        """Let the runner release and copy as the books say; return slots that did not get their copy."""
        lost = set()
        for operation in self._slots.take_operations():
            if isinstance(operation, Release):
                self._runner.release(operation.slot)
                continue
            if isinstance(operation, Save):
                self._mover.save(operation.slot, operation.keys)
                continue
            try:
                self._runner.copy_prefix(operation.source, operation.target, operation.length)
            except ProviderRuntimeError as error:
                _log.warning("%s failed, its target will be computed again: %s", operation, error)
                lost.add(operation.target)
                if self._slots.is_idle(operation.source):  # or its request would take it again and again
                    lost.add(operation.source)
        return lost


def _observe_prompts(plan: StepPlan, logits: list[Logits]) -> None:
    """Give the logits of prompts to the requests that want them."""
    for row, request, own in zip(plan.rows, plan.requests, logits, strict=True):
        if request.awaits_prompt_logprobs and not isinstance(own, BestLogits) and len(own):
            request.observe_prompt(row.start + len(row.tokens) - len(own), own)
