"""Continuous batching: an engine steps many requests through one runner."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Collection
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
from ...providers.native.best_draws import best_draws
from ..process.faults import fault_text, log_fault
from .config import EngineConfig as EngineConfig
from .kv.event_publisher import EventPublisher, KVEventsConfig
from .kv.held_blocks import HeldBlocks
from .kv.slot_operations import SlotOperations
from .kv.slots import Release, SlotTable, Trimming
from .kv.tiers.chunk_store import ChunkStore
from .kv.tiers.mover import KVMover, make_tier, own_folder
from .kv_policies import KVPolicy, PolicyParts, chosen_policy
from .requests.chunk import Tier, TierPrefix
from .requests.prefill_client import HttpPrefillClient, PrefillClient
from .requests.prompt_costs import PromptCosts
from .requests.request import Request
from .sampling.sampler import NO_TOKEN, Sample
from .schedule.adapter_places import AdapterPlaces
from .schedule.admission import checked_room
from .schedule.compiling import CompilingRequests
from .schedule.deadlines import Deadlines
from .schedule.remote_prefills import RemotePrefills
from .schedule.scheduler import Scheduler, StepPlan
from .speculation.forced_tokens import ForcedTokens
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator
from .stats import Counters, EngineStats
from .step import PlanRunner, Step, StepSampler, observe_prompts
from .token_limits import TokenLimits, encoder_tokens, state_tokens

_log = logging.getLogger(__name__)

_NOTHING_TO_SAMPLE = (
    "no token can be sampled: the logits are not finite numbers, or the options forbid all tokens"
)

# Seconds that a step may spend on restoring KV from the tiers, with and without running streams.
_RESTORE_BESIDE, _RESTORE_ALONE = 0.02, 0.2


class Engine:
    """Run requests on a runner, one batched step at a time. Not thread-safe.

    Args:
        runner: holds the model and the KV cache; the engine closes it.
        config: options; ``max_slots`` is taken from the runner.
        proposer: proposes tokens for speculative decoding; the engine closes it.
        identity: a hash of the model's content, under which KV is stored on disk.

    Attributes:
        clock: returns seconds; speculation measures steps with it.
        runner: as given, to be read only while no step runs.
        scheduler: which requests run and which wait.

    Raises:
        UsageError: two options exclude each other, or the runner does not support one.
        ProviderUnavailableError: the library of CPU kernels, which draws from largest logits, is damaged.
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
        self._limits = limits = TokenLimits.of(config, info)
        self.max_length = limits.sequence
        best_draws()  # a damaged library is refused now, and not in a step
        self.clock: Callable[[], float] = time.perf_counter
        self.runner = runner
        policy = chosen_policy(config)
        trimming = _trimming(config, info) if policy.frees_windows else None
        states, fixed = state_tokens(info), encoder_tokens(info)
        if states:
            _check_states(config)
        self._slots = SlotTable(info.max_slots, limits.kv, trimming, info.kv_groups, states, fixed)
        costs = PromptCosts()
        self._mover = KVMover(runner, _tier(config, info, identity, costs), identity, costs)
        events = _events_config(config)
        self._blocks = None if events is None else HeldBlocks(self._mover.identity)
        self.scheduler = Scheduler(
            self._slots,
            limits.step,
            prefix_cache=config.prefix_cache,
            stretch=config.max_step_slowdown,
            costs=costs,
            stored=self._mover if self._mover.active else None,
            trims_always=config.trim_windows == "always" or not config.prefix_cache,
            adapters=_adapter_places(runner),
            whole_pictures=info.image_ahead,
            blocks=self._blocks,
        )
        client = _prefill_client(config, self.kv_identity)
        self._prefills = RemotePrefills(client, config.prefill_tokens, self.scheduler.seconds_of_prompt)
        self._operations = SlotOperations(runner, self._slots, self._mover)
        self._proposes = proposer is not None
        self._speculator = Speculator(
            [ForcedTokens(), *([proposer] if proposer is not None else [])],
            batched=info.batched_multi_token,
            max_step_tokens=limits.step,
            adaptive=config.adaptive_speculation,
        )
        reads_states = self._speculator.wants_states if self._speculator.readers else None
        self._plans = PlanRunner(runner, config.logits_processors, reads_states)
        parts = PolicyParts(
            runner=runner, scheduler=self.scheduler, speculator=self._speculator, max_length=limits.sequence
        )
        self._policy: KVPolicy = policy(config, parts)
        self._drops_kv = policy is not KVPolicy
        # A token that a proposer needs, a state and a policy must not meet a token that is not known yet.
        self._runs_ahead = bool(info.steps_ahead) and not (self._proposes or states or self._drops_kv)
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._compiling = CompilingRequests(config.grammar_timeout_seconds)
        self._counters = Counters()
        self._sampler = StepSampler(config.logits_processors, self._append_token)
        self._publisher = None if events is None else EventPublisher(events)
        self._news: dict[Request, None] = {}  # requests that gained tokens or ended in this step, in order

    @property
    def kv_identity(self) -> str:
        """A hash of the model's content and its layout of KV: engines with equal ones can share KV."""
        return hashlib.sha256(self._mover.identity.encode()).hexdigest()

    @property
    def chunk_store(self) -> ChunkStore | None:
        """The store of ``prefix_cache_url``; None without one."""
        return self._mover.store

    def flush_tiers(self, seconds: float) -> bool:
        """Wait until saved KV is where other processes find it; return whether it is. Any thread may call."""
        return self._mover.flush(seconds)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request; its ``max_tokens`` is limited to the free part of the context.

        Raises:
            PromptTooLongError: the prompt can never fit.
            RequestError: the prompt is empty, has token ids outside the vocabulary, or the id is in use.
            InvalidSamplingError: an option names a token id outside the vocabulary.
            QueueFullError: ``max_queue`` requests are waiting, or ``max_queued_tokens`` are to be computed.
            UsageError: an embedding is wanted, and the runner has no hidden states.
        """
        limit = self.config.max_queue
        if limit is not None and len(self._requests) >= self.info.max_slots + limit:
            raise QueueFullError(f"all slots are taken and {limit} requests are waiting; retry later")
        if request.request_id in self._requests:
            raise RequestError(f"request id '{request.request_id}' is in use; ids must be unique")
        room = checked_room(request, self.info, self.max_length)
        self._check_images(request)
        self._check_encoder(request)
        self._queue_tokens(request)
        self._policy.admit(request, room)
        self._requests[request.request_id] = request
        _log.debug("request %s: %d prompt tokens", request.request_id, request.num_tokens)
        self._counters.prompt_tokens += request.num_tokens
        self._deadlines.add(request)
        if request.awaited_grammar is None:
            self._queue(request)
        else:
            self._compiling.add(request)

    def _queue(self, request: Request) -> None:
        """Queue a request, at once or when a prefill server has computed its prompt."""
        if not self._prefills.add(request):
            self.scheduler.add(request)

    def _queue_tokens(self, request: Request) -> None:
        """Count the tokens of a new request, and estimate its time to the first token.

        Raises:
            QueueFullError: too many prompt tokens are still to be computed.
        """
        further = request.first_sample in self._requests  # its prompt is that of an admitted one
        shares = further and self.config.prefix_cache  # all but the last token
        request.queued_tokens = 1 if shares else self.scheduler.uncached_tokens(request)
        queued = self.scheduler.queued_tokens + self._compiling.queued_tokens + self._prefills.queued_tokens
        limit, seconds = self.config.max_queued_tokens, self.scheduler.costs.seconds_of_prompts
        if limit is not None and not further and 0 < queued > limit - request.queued_tokens:
            error = QueueFullError(
                f"{queued} tokens of prompts are still to be computed, and with {request.queued_tokens} more "
                f"they exceed max_queued_tokens, {limit}; retry later"
            )
            error.retry_after = seconds(queued + request.queued_tokens - limit) or 0.0
            raise error
        request.expected_seconds = seconds(queued + request.queued_tokens)

    def _check_encoder(self, request: Request) -> None:
        """Check that a prompt comes with an encoder output if the model attends to one, and only then.

        Raises:
            RequestError: it does not.
        """
        if (request.encoder is None) is (self.info.encoder_width == 0):
            return
        if request.encoder is None:
            raise RequestError(
                "this model writes down what its encoder hears or sees, so a prompt alone is not enough; "
                "send a sound "
                "or a picture"
            )
        raise RequestError("this model has no encoder, so it hears and sees nothing; send a text")

    def _check_images(self, request: Request) -> None:
        """Check that the pictures of a prompt can be computed, and stay where they are.

        Raises:
            RequestError: the runner takes none, or the options drop tokens of a sequence.
        """
        if request.images is None:
            return
        if request.images.states.shape[1] != self.info.image_width:
            raise RequestError("this model reads text only, not images; leave them out")
        if type(self._policy) is not KVPolicy:
            raise RequestError(
                "pictures cannot be combined with context_shift or KV eviction, which drop tokens; omit these"
            )

    def cancel(self, request_id: str) -> Request | None:
        """End a request with finish_reason "cancelled"; return it, or None if it is not in the engine."""
        request = self._requests.get(request_id)
        if request is not None:
            self._cancel(request)
            self._free()
        return request

    def clear_prefix_cache(self) -> None:
        """Free the KV that finished requests left in the slots."""
        self.scheduler.cache.clear()
        self._free()

    def step(self) -> list[Request]:
        """Finish one step; return the requests that gained tokens or ended.

        Where the runner takes a step ahead, the next one is planned and submitted before this one is done.
        """
        self._news = {}
        if self._deadlines.first <= time.monotonic():
            self._expire()
        if self._compiling.deadlines:
            self._take_compiled()
        if self._prefills.waiting:
            self._take_prefilled()
        begin = self.clock()
        step = self._plans.flight or self._plans.submit(self._plan())
        self._plans.flight = self._submit_ahead(step) if self._runs_ahead else None
        self._finish(step, begin)
        return list(self._news)

    def stats(self) -> EngineStats:
        """Return the current counters and gauges."""
        held = self._slots.used_tokens + self._slots.idle_tokens
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting + len(self._compiling) + len(self._prefills.waiting),
            slots=self._slots.num_slots,
            kv_tokens=held,
            idle_kv_tokens=self._slots.idle_tokens,
            kv_tokens_budget=self._limits.kv_budget,
            kv_bytes=self.runner.kv_bytes,
            kv_bytes_budget=self.config.kv_bytes,
            preemptions=self.scheduler.preemptions,
            **dataclasses.asdict(self._counters),
            **dataclasses.asdict(self._plans.counters),
            **dataclasses.asdict(self.scheduler.cache.counters),
            **dataclasses.asdict(self._mover.counters),
            **dataclasses.asdict(self._prefills.counters),
            **dataclasses.asdict(self._speculator.counters),
        )

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the LoRA adapters of running requests, and of waiting ones."""
        running, waiting = set[str](), set[str]()
        for request in list(self._requests.values()):
            if request.adapter is not None:
                (waiting if request.lora_place is None else running).add(request.adapter.name)
        return sorted(running), sorted(waiting)

    def check_integrity(self) -> None:
        """Check that requests, queue and slots agree.

        Raises:
            RuntimeError: they do not; the message says how.
        """
        flight = self._plans.flight
        self.scheduler.check_integrity(None if flight is None else flight.plan)
        aside = len(self._compiling) + len(self._prefills.waiting)
        held = len(self.scheduler.running) + self.scheduler.num_waiting + aside
        if held != len(self._requests):
            raise RuntimeError(f"{len(self._requests)} requests are unfinished, the scheduler holds {held}")

    def close(self) -> list[Request]:
        """Cancel all requests, write idle prefixes to the tiers and free the runner; return the cancelled."""
        cut = [request for request_id in list(self._requests) if (request := self.cancel(request_id))]
        self._free()
        self._mover.patient = True
        self.scheduler.cache.clear(save=True)
        self._free()
        self._mover.close()
        self._prefills.close()
        if self._publisher is not None:
            self._publisher.close()
        self.runner.close()
        self._speculator.close()
        return cut

    def _cancel(self, request: Request, why: str | None = None) -> None:
        request.finish("cancelled", why)
        self._counters.cancelled += 1
        self._retire(request)

    def _expire(self) -> None:
        """Cancel the requests whose deadline has passed, waiting or running."""
        for request in self._deadlines.take(time.monotonic()):
            if not request.finished:
                self._cancel(request, "deadline")

    def _append_token(self, request: Request, sample: Sample) -> None:
        """Append a sampled token to its request; the request fails if there is none."""
        self._news[request] = None
        if sample.token_id == NO_TOKEN:
            why = request.sampling_error or sample.error or _NOTHING_TO_SAMPLE
            request.invalid = request.sampling.invalid
            self._fail(request, ProviderRuntimeError(why))
            return
        try:
            request.append(sample)
        except Exception as error:  # noqa: BLE001 -- a tokenizer's fault must not end other requests
            log_fault(_log, request.request_id, "the tokenizer or the grammar", error)
            self._fail(request, RequestFailedError(fault_text("the tokenizer or the grammar", error)))
            return
        self._counters.generated_tokens += 1
        if request.finished:
            self._counters.finished += 1
            self._retire(request)

    def _take_compiled(self) -> None:
        """Queue requests whose grammar is ready, and end those whose grammar is refused."""
        if len(self._compiling) == len(self._requests):
            self._compiling.pause()  # all requests wait for a grammar
        ready, refused = self._compiling.take()
        for request in ready:
            self._queue(request)
        for request in refused:
            self._fail(request, request.fault)

    def _take_prefilled(self) -> None:
        """Queue requests whose prompt the prefill server has computed, or is late with."""
        if len(self._prefills.waiting) == len(self._requests):
            self._prefills.pause()  # all requests wait for it
        for request in self._prefills.take():
            self.scheduler.add(request)

    def _fail(self, request: Request, error: CarryallError | None) -> None:
        request.finish("error", error=str(error))
        self._counters.failed += 1
        self._retire(request, keep=False)

    def _retire(self, request: Request, *, keep: bool = True) -> None:
        count = len(request.output_token_ids)
        _log.debug("request %s: %s after %d tokens", request.request_id, request.finish_reason, count)
        self._news[request] = None
        del self._requests[request.request_id]
        self._speculator.forget(request)
        if not (self._compiling.discard(request) or self._prefills.discard(request)):
            self.scheduler.remove(request, keep=keep)

    def _plan(self) -> StepPlan:
        """Choose the rows of the next step; copy, evict and restore KV as they need it.

        Rows whose KV was lost are left out. Proposed tokens come last, since they use the rest of the step.
        """
        plan = self.scheduler.plan()
        lost = self._operations.apply(self._slots.take_operations()) if self._slots.operations else set()
        lost |= self.runner.take_lost()
        if self._drops_kv:
            lost |= self._policy.before_run(plan.requests)
        if lost:
            self._invalidate(lost)
            plan = plan.without([i for i, row in enumerate(plan.rows) if row.slot in lost])
        if plan.restoring:
            for request in self._mover.restore(
                plan.restoring, _RESTORE_BESIDE if plan.rows else _RESTORE_ALONE
            ):
                if request.slot is not None:
                    self.scheduler.invalidate(request.slot)
                    request.stored = TierPrefix()  # it is computed, not restored again
            for request in plan.restoring:
                self.scheduler.cache.computed(request)
                if self.scheduler.cache.trims_always:
                    self.scheduler.cache.trim(request)
        if self._proposes or plan.constrained:
            plan = self._speculator.with_proposals(plan, self.scheduler)
        if plan.constrained:
            for i in plan.sampling:
                plan.requests[i].prepare_sampling()
        return plan

    def _invalidate(self, slots: Collection[int]) -> None:
        """Compute the requests of slots again whose KV was lost, and forget idle ones."""
        for slot in slots:
            self.scheduler.invalidate(slot)

    def _submit_ahead(self, step: Step) -> Step | None:
        """Plan and submit the step after ``step``, which is in flight; None if that must be finished first.

        That is so where anything but rows of known and drawn tokens is to be done: the runner must be idle.
        """
        if step.pending is None or not all(isinstance(each, Release) for each in step.frees):
            return None
        plan = self.scheduler.plan_ahead(step.plan)
        if plan is None or not plan.rows:
            return None
        if plan.constrained:
            for i in plan.sampling:
                plan.requests[i].prepare_sampling()
        return self._plans.submit(plan)

    def _finish(self, step: Step, begin: float) -> None:
        """Record what a step computed, and sample its tokens."""
        result = self._plans.finish(step)
        plan = result.plan
        for request, fault in result.faults:
            self._fail(request, fault)
        self._invalidate(result.lost)
        if result.too_many:
            self.scheduler.shrink(result.too_many)
        if result.seconds is not None:
            self.scheduler.learn(plan, result.seconds)
        self.scheduler.commit(plan)
        if plan.observed:
            for request in observe_prompts(plan, result.logits, self.info.embedding_size):
                self._counters.finished += 1
                self._retire(request)
        accepted = self._sampler.sample(plan, result.logits)
        if self._speculator.readers:
            self._speculator.observe(plan, accepted)
        if plan.ahead or any(step.plan.proposed):
            flight = self._plans.flight
            self.scheduler.settle(step.plan, None if flight is None else flight.plan)
        if self._drops_kv:
            self._policy.after_step(plan.requests)
        if self._proposes or step.plan.constrained:
            self._speculator.learn(plan, accepted, self.clock() - begin)
        if self._sampler.late:
            self._sampler.sample_late(patient=not plan.rows)
        if step.frees:
            self._operations.apply(step.frees)
        self._free()

    def _free(self) -> None:
        """Carry out the queued operations on slots, at the end of the step in flight if there is one."""
        if self._blocks is not None and self._publisher is not None and (events := self._blocks.take()):
            self._publisher.publish(events)
        flight = self._plans.flight
        if flight is not None and self._requests:
            flight.frees += self._slots.take_operations()
            return
        if flight is not None:  # its rows belong to nobody
            self._operations.apply(self._plans.drop_flight())
        if self._slots.operations:
            self._operations.apply(self._slots.take_operations())


def _trimming(config: EngineConfig, info: RunnerInfo) -> Trimming | None:
    """Return how KV behind sliding windows is freed and counted; None if the runner cannot free it."""
    if not info.trim_step:
        return None
    return Trimming(info.trim_step, info.kv_groups, info.trim_step * config.prefix_cache)


def _check_states(config: EngineConfig) -> None:
    """Check that no option drops tokens: a state sums up all of them.

    Raises:
        UsageError: an option does.
    """
    if config.context_shift:
        raise UsageError("context_shift cuts sequences, which layers with a state do not allow; omit it")


def _adapter_places(runner: Runner) -> AdapterPlaces | None:
    """Return the places of LoRA adapters; None if the runner has none."""
    places = runner.info.max_loras
    return AdapterPlaces(places, runner.load_lora) if places else None


def _events_config(config: EngineConfig) -> KVEventsConfig | None:
    """Return how the events of the prefix cache are published; None if nobody asked for them.

    Raises:
        UsageError: an option is invalid, or there is no prefix cache.
    """
    if config.kv_events_config is None:
        return None
    options = KVEventsConfig.parse(config.kv_events_config)
    if not options.enable_kv_cache_events or options.publisher == "null":
        return None
    if not config.prefix_cache:
        raise UsageError("kv_events_config tells what the prefix cache holds; it needs prefix_cache")
    return options


def _prefill_client(config: EngineConfig, identity: str) -> PrefillClient | None:
    """Return the client of the prefill server; None without one.

    Raises:
        UsageError: there is no shared tier through which KV could come, or the URL is invalid.
    """
    if config.prefill_server is None:
        return None
    if config.prefix_cache_url is None:
        raise UsageError("prefill_server hands KV over through a shared store; set prefix_cache_url too")
    return HttpPrefillClient(config.prefill_server, identity)


def _tier(config: EngineConfig, info: RunnerInfo, identity: str, costs: PromptCosts) -> Tier | None:
    """Open the tiers that the options ask for; None if there are none."""
    folder, folder_bytes = config.prefix_cache_dir, config.prefix_cache_bytes
    if folder == "auto":
        folder = None
        if identity and info.kv_layout and config.prefix_cache:
            folder, folder_bytes = own_folder(folder_bytes)
    elif folder is not None:
        folder = Path(folder)
    url = config.prefix_cache_url
    name = "prefix_cache_dir" if url is None else "prefix_cache_url"
    if (folder is not None or url is not None) and not identity:
        raise UsageError(f"{name} needs the model's identity: load it with LLM, or pass identity")
    if info.encoder_width and (folder is not None or url is not None or config.swap_bytes):
        raise UsageError(
            "KV of a decoder that attends to an encoder's rows (Whisper, TrOCR, Donut, Florence-2) stays in "
            "its slots, since KV alone does not say what it attended to; omit prefix_cache_dir, "
            "prefix_cache_url and swap_bytes"
        )
    return make_tier(folder, folder_bytes, config.swap_bytes, info.kv_layout, url, costs)
