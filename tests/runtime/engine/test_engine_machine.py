"""Random arrivals, forks, deadlines, cancellations and failures: no leaks, no starvation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from engine_kit import VOCAB, alone, make_engine, make_request, vector
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from speculation_kit import Oracle

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import KVEviction, Row
from carryall.runtime.engine.requests.pooled_states import Pooling
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.engine.speculation.proposer import Proposer
from carryall.runtime.types.sampling_params import SamplingParams

POISON = VOCAB - 1  # a prompt token that makes every run with it fail
CONTEXT = 64
PROPOSERS = (None, PromptLookup, lambda: Oracle(lie_every=4), lambda: Oracle(max_tokens=9))


class EngineMachine(RuleBasedStateMachine):
    """An engine under random operations and faults."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(
        max_slots=st.integers(1, 5),
        max_step_tokens=st.integers(5, 40),
        kv_tokens=st.one_of(st.none(), st.integers(CONTEXT, 2 * CONTEXT)),
        prefix_cache=st.booleans(),
        proposer=st.sampled_from(PROPOSERS),
        adaptive=st.booleans(),
        kv_eviction_tokens=st.sampled_from([None, None, 10, 24]),
        window=st.sampled_from([0, 2, 5, 12]),
        trims_always=st.booleans(),
        swap_tokens=st.sampled_from([0, 0, 1000]),
    )
    def start(
        self,
        max_slots: int,
        max_step_tokens: int,
        kv_tokens: int | None,
        prefix_cache: bool,
        proposer: Callable[[], Proposer] | None,
        adaptive: bool,
        kv_eviction_tokens: int | None,
        window: int,
        trims_always: bool,
        swap_tokens: int,
    ) -> None:
        made = proposer() if proposer is not None else None
        self.most_proposed = made.max_tokens if made is not None else 0
        self.engine, self.runner = make_engine(
            max_slots=max_slots,
            max_step_tokens=max_step_tokens,
            kv_tokens=kv_tokens,
            context_length=CONTEXT,
            prefix_cache=prefix_cache,
            proposer=made,
            adaptive=adaptive,
            kv_eviction_tokens=kv_eviction_tokens
            if kv_eviction_tokens is None or 2 * window <= kv_eviction_tokens
            else 24,
            window=window,
            trims_always=trims_always,
            swap_tokens=swap_tokens,
        )
        self.copy_prefix = self.runner.copy_prefix
        self.runner.copy_prefix = self.copy_or_fail  # type: ignore[method-assign]
        self.runner.before_forward = self.fail
        self.evict_kv = self.runner.evict_kv
        self.runner.evict_kv = self.evict_or_fail  # type: ignore[method-assign]
        self.eviction_failures = 0
        self.all: list[Request] = []
        self.spurious_failures = 0
        self.copy_failures = 0

    def copy_or_fail(self, source: int, target: int, length: int) -> None:
        assert source != target
        assert length > 0
        if self.copy_failures:
            self.copy_failures -= 1
            self.runner.hashes[target] = [0] * length  # left by an interrupted copy
            raise ProviderRuntimeError("no copy")
        self.copy_prefix(source, target, length)

    def evict_or_fail(self, slot: int, length: int, eviction: KVEviction) -> None:
        if self.eviction_failures:
            self.eviction_failures -= 1
            raise ProviderRuntimeError("no eviction")
        self.evict_kv(slot, length, eviction)

    def fail(self, rows: Sequence[Row]) -> None:
        if any((row.tokens == POISON).any() for row in rows):
            raise ProviderRuntimeError("poison")
        if self.spurious_failures and len(rows) > 1:
            self.spurious_failures -= 1
            raise ProviderRuntimeError("spurious")

    @rule(
        target=requests,
        size=st.integers(1, CONTEXT - 1),
        max_tokens=st.integers(1, CONTEXT),
        seed=st.one_of(st.none(), st.integers(0, 99)),
        priority=st.integers(-1, 1),
        poisoned=st.sampled_from([False, False, False, True]),
        parent=st.one_of(st.none(), st.integers(0, 20)),
        shared=st.integers(1, CONTEXT - 1),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def add(
        self,
        size: int,
        max_tokens: int,
        seed: int | None,
        priority: int,
        poisoned: bool,
        parent: int | None,
        shared: int,
        salt: str | None,
    ) -> Request:
        prompt = np.random.default_rng(len(self.all)).integers(0, POISON, size).tolist()
        if parent is not None and self.all:  # begin like an earlier request and its answer
            earlier = self.all[parent % len(self.all)]
            known = [t for t in (*earlier.prompt_token_ids, *earlier.output_token_ids) if t != POISON]
            prompt = (known[:shared] + prompt)[: CONTEXT - 1]
            size = len(prompt)
        if poisoned:
            prompt[size // 2] = POISON
        options = {"temperature": 0.0} if seed is None else {"seed": seed}
        params = SamplingParams(max_tokens=max_tokens, **options)
        request = make_request(str(len(self.all)), prompt, params, priority=priority, cache_salt=salt)
        self.all.append(request)
        self.engine.add(request)
        return request

    @rule(target=requests, parent=requests, seed=st.integers(0, 99))
    def fork(self, parent: Request, seed: int) -> Request:
        """Add another sample of a prompt, as ``n`` and beam search do."""
        params = SamplingParams(max_tokens=parent.params.max_tokens, seed=seed)
        request = make_request(str(len(self.all)), parent.prompt_token_ids, params)
        self.all.append(request)
        self.engine.add(request)
        return request

    @rule(target=requests, size=st.integers(1, CONTEXT - 1), pooling=st.sampled_from(["last", "mean"]))
    def embed(self, size: int, pooling: Pooling) -> Request:
        prompt = np.random.default_rng(size).integers(0, POISON, size).tolist()
        request = Request(str(len(self.all)), prompt, SamplingParams(max_tokens=1), pooling=pooling)
        self.all.append(request)
        self.engine.add(request)
        return request

    @rule(request=consumes(requests))
    def let_time_run_out(self, request: Request) -> None:
        """Let a deadline pass while the request waits, runs or has ended; the next step must end it."""
        if not request.finished:
            request.deadline = 0.0
            self.engine._deadlines.add(request)

    @rule(request=consumes(requests))
    def cancel(self, request: Request) -> None:
        was_finished = request.finished
        assert (self.engine.cancel(request.request_id) is None) == was_finished
        assert request.finished
        assert request.slot is None

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            before = {r.request_id: len(r.output_token_ids) for r in self.all}
            changed = self.engine.step()
            self.engine.check_integrity()
            for request in self.all:
                grown = len(request.output_token_ids) - before[request.request_id]
                assert 0 <= grown <= 1 + self.most_proposed
                assert request in changed or not grown
                assert request.finished or request.deadline is None

    @rule(count=st.integers(1, 3))
    def fail_spuriously(self, count: int) -> None:
        self.spurious_failures += count

    @rule()
    def fail_a_copy(self) -> None:
        self.copy_failures = 1

    @rule()
    def fail_an_eviction(self) -> None:
        self.eviction_failures = 1

    @rule()
    def clear_the_prefix_cache(self) -> None:
        self.engine.clear_prefix_cache()
        assert self.engine.stats().idle_kv_tokens == 0

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.running + stats.waiting == sum(not r.finished for r in self.all)
        slots = self.engine._slots
        held = sum(
            request.num_computed
            - request.num_dropped
            - (slots.tokens(request.slot) - slots.worth(request.slot))
            for request in self.all
            if request.slot is not None
        )
        # Rejected proposals stay in their slots until they are overwritten.
        refused = self.most_proposed * stats.slots
        assert self.runner.held_tokens() <= stats.kv_tokens + refused
        assert held <= stats.kv_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        limit = 200 + sum(len(r.prompt_token_ids) + 2 * CONTEXT for r in self.all) * 4
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.engine.check_integrity()
        assert not self.engine.has_work, "somebody starves"
        left = self.runner.held_tokens() - self.engine.stats().idle_kv_tokens
        assert 0 <= left <= self.most_proposed * self.engine.stats().slots
        self.engine.clear_prefix_cache()
        assert self.runner.held_tokens() == 0, "a slot's memory leaks"
        for request in self.all:
            if request.pooling is not None and request.finish_reason == "stop":
                found = request.embedding
                assert found is not None
                assert np.allclose(found, vector(request.prompt_token_ids, request.pooling), atol=1e-5)
            elif POISON in request.prompt_token_ids:
                assert request.finish_reason in ("error", "cancelled")
            elif request.finish_reason == "error":
                assert POISON in request.output_token_ids
            elif request.finish_reason != "cancelled":
                assert request.output_token_ids == _expected(request)
            else:
                assert request.stop_reason == "deadline" or request.deadline is None
                count = len(request.output_token_ids)
                assert request.output_token_ids == _expected(request)[:count]


def _expected(request: Request) -> list[int]:
    room = CONTEXT - len(request.prompt_token_ids)
    return alone(request)[:room]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
