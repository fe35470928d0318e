"""Continuous batching: many requests, one runner, one step at a time."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from ...errors import (
    CarryallError,
    ProviderRuntimeError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    UsageError,
)
from ...providers.base import Runner, RunnerInfo
from ..process.faults import fault_text, log_fault
from .config import EngineConfig as EngineConfig
from .kv.slot_operations import SlotOperations
from .kv.slots import SlotTable, Windows
from .kv.tiers.mover import KVMover, make_tier
from .kv_policies import chosen_policy
from .kv_policy import KVPolicy, PolicyParts
from .late_draws import LateDraws
from .plan_draws import draw_tokens, observe_prompts
from .plan_runner import PlanRunner
from .requests.chunk import Tier
from .requests.prompt_costs import PromptCosts
from .requests.request import Request
from .sampling.sampler import NO_TOKEN, Sample
from .schedule.admission import checked_room
from .schedule.compiling import CompilingRequests
from .schedule.deadlines import Deadlines
from .schedule.scheduler import Scheduler, StepPlan
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


class Engine:
    """Requests in, tokens out. Not thread-safe: one thread at a time may use it.

    Args:
        runner: holds the model and the KV cache; the engine closes it.
        config: how to schedule; ``max_slots`` is the runner's.
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
        self.info = info = runner.info
        self.config = config = dataclasses.replace(config or EngineConfig(), max_slots=info.max_slots)
        if config.max_step_tokens < info.max_slots:
            raise UsageError(
                f"max_step_tokens {config.max_step_tokens} is less than the {info.max_slots} slots, "
                "each of which needs a token a step; raise it or lower max_slots"
            )
        kv_tokens = _kv_tokens(config, info)
        # The last token generated needs no KV.
        self.max_length = (
            info.context_length if kv_tokens is None else min(info.context_length, kv_tokens + 1)
        )
        self.clock: Callable[[], float] = time.perf_counter
        self._runner = runner
        policy = chosen_policy(config)
        windows = _windows(config, info) if policy.frees_windows else None
        every_slot = info.max_slots * info.context_length
        self._kv_tokens_budget = every_slot if kv_tokens is None else min(every_slot, kv_tokens)
        self._slots = SlotTable(info.max_slots, kv_tokens, windows)
        costs = PromptCosts()
        self._mover = KVMover(runner, _tier(config, info, identity), identity, costs)
        self._scheduler = Scheduler(
            self._slots,
            config.max_step_tokens,
            prefix_cache=config.prefix_cache,
            stretch=config.max_step_slowdown,
            costs=costs,
            stored=self._mover if self._mover.active else None,
            trims_always=config.trim_windows == "always" or not config.prefix_cache,
        )
        self._operations = SlotOperations(runner, self._slots, self._mover)
        self._plans = PlanRunner(runner, config.logits_processors)
        self._speculator = Speculator(
            [ForcedTokens(), *([proposer] if proposer is not None else [])],
            batched=info.batched_multi_token,
            max_step_tokens=config.max_step_tokens,
            adaptive=config.adaptive_speculation,
        )
        parts = PolicyParts(
            runner=runner,
            scheduler=self._scheduler,
            speculator=self._speculator,
            max_length=self.max_length,
        )
        self._policy: KVPolicy = policy(config, parts)
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._compiling = CompilingRequests(config.grammar_timeout_seconds)
        self._counters = Counters()
        self._late = LateDraws()

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
        self._policy.admit(request, room)
        self._requests[request.request_id] = request
        _log.debug("request %s: %d prompt tokens", request.request_id, request.num_tokens)
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
            self._operations.apply()
        return request

    def clear_prefix_cache(self) -> None:
        """Give back the memory of everything that finished requests left behind."""
        self._scheduler.cache.clear()
        self._operations.apply()

    def step(self) -> list[Request]:
        """Run one step; return the requests that gained tokens or ended."""
        expired = self._expire()
        refused = self._take_compiled()
        begin = self.clock()
        plan = self._prepare(self._scheduler.plan())
        ran = self._plans.run(plan)
        plan, failed = ran.plan, [request for request, _ in ran.faults]
        for request, fault in ran.faults:
            self._fail(request, fault)
        if ran.seconds is not None:
            self._scheduler.learn(plan, ran.seconds)
        self._scheduler.commit(plan)
        embedded = observe_prompts(plan, ran.logits)
        for request in embedded:
            self._counters.finished += 1
            self._retire(request)
        drawing = plan.drawing()
        known = {i: plan.requests[i].num_tokens for i in drawing}
        processors = self.config.logits_processors
        accepted = draw_tokens(plan, ran.logits, drawing, processors, self._take, self._late)
        self._scheduler.settle(plan)
        self._policy.after_step(plan.requests)
        self._speculator.learn(plan, accepted, self.clock() - begin)
        late = self._late.draw(processors, self._take, patient=not plan.rows)
        self._operations.apply()
        told = [plan.requests[i] for i in drawing if _has_news(plan.requests[i], known[i])]
        return expired + refused + failed + embedded + told + late

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        held = self._slots.used_tokens + self._slots.idle_tokens
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.num_waiting + len(self._compiling),
            slots=self._slots.num_slots,
            kv_tokens=held,
            idle_kv_tokens=self._slots.idle_tokens,
            kv_tokens_budget=self._kv_tokens_budget,
            kv_bytes=self._runner.kv_bytes,
            kv_bytes_budget=self.config.kv_bytes,
            preemptions=self._scheduler.preemptions,
            **dataclasses.asdict(self._counters),
            **dataclasses.asdict(self._plans.counters),
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
        self._mover.patient = True
        self._scheduler.cache.clear(save=True)
        self._operations.apply()
        self._mover.close()
        self._runner.close()
        self._speculator.close()
        return cut

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

    def _take(self, request: Request, sample: Sample) -> None:
        """Give a request the token drawn for it."""
        if sample.token_id == NO_TOKEN:
            why = request.draw_error or sample.error or _NOTHING_TO_DRAW
            self._fail(request, ProviderRuntimeError(why))
            return
        try:
            request.append(sample)
        except Exception as error:  # noqa: BLE001 -- the tokenizer's, say; all other requests live on
            log_fault(_log, request.request_id, "the tokenizer or the grammar", error)
            self._fail(request, RequestFailedError(fault_text("the tokenizer or the grammar", error)))
            return
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
        count = len(request.output_token_ids)
        _log.debug("request %s: %s after %d tokens", request.request_id, request.finish_reason, count)
        del self._requests[request.request_id]
        self._speculator.forget(request)
        if not self._compiling.discard(request):
            self._scheduler.remove(request, keep=keep)

    def _prepare(self, plan: StepPlan) -> StepPlan:
        """Move KV to where the plan expects it; return the plan without the rows for which that failed."""
        lost = self._operations.apply() | self._policy.before_run(plan.requests)
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


def _has_news(request: Request, known: int) -> bool:
    return request.finished or request.num_tokens > known


def _kv_tokens(config: EngineConfig, info: RunnerInfo) -> int | None:
    """For how many tokens there is KV in all; None is no limit beyond the slots'."""
    if config.kv_bytes is None:
        return info.kv_tokens
    most = config.kv_bytes // max(1, info.kv_bytes_per_token)
    return most if info.kv_tokens is None else min(most, info.kv_tokens)


def _windows(config: EngineConfig, info: RunnerInfo) -> Windows | None:
    """What KV behind sliding windows is worth; None if the runner cannot free it."""
    if not info.trim_step:
        return None
    share = Fraction(info.window_bytes_per_token, max(1, info.kv_bytes_per_token))
    return Windows(info.trim_step, info.sliding_window, share, info.trim_step * config.prefix_cache)


def _tier(config: EngineConfig, info: RunnerInfo, identity: str) -> Tier | None:
    """What the options ask for to keep KV in outside of the runner."""
    folder = None if config.prefix_cache_dir is None else Path(config.prefix_cache_dir)
    if folder is not None and not identity:
        raise UsageError("prefix_cache_dir needs to know the model: load it with LLM, or give identity")
    return make_tier(folder, config.prefix_cache_bytes, config.swap_bytes, info.kv_layout)
