"""Requests with KV eviction: when KV is evicted, which requests share it, and which options are rejected."""

from __future__ import annotations

import dataclasses

import pytest
from engine_kit import GREEDY, alone, make_engine, make_request, make_runner, run

from carryall.errors import UsageError
from carryall.providers.base import KVEviction
from carryall.providers.kv_groups import WindowKV
from carryall.runtime.engine.engine import Engine, EngineConfig

LONG = dataclasses.replace(GREEDY, max_tokens=90)


def test_a_request_holds_no_more_than_a_quarter_above_what_it_keeps() -> None:
    engine, runner = make_engine(kv_eviction_tokens=20)
    request = make_request("a", 70, LONG)
    expected = alone(request)
    engine.add(request)
    held = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if len(request.output_token_ids) > 1 and not request.finished:
            assert runner.held_tokens() == engine.stats().kv_tokens
            held.append(runner.held_tokens())
    assert min(held) == 21
    assert max(held) == 25
    assert request.output_token_ids == expected


def test_sinks_and_the_recent_half_stay() -> None:
    engine, runner = make_engine(kv_eviction_tokens=20)
    seen = []
    own = runner.evict_kv

    def record(slot: int, length: int, eviction: KVEviction) -> None:
        seen.append((length, eviction))
        own(slot, length, eviction)

    runner.evict_kv = record  # type: ignore[method-assign]
    run(engine, [make_request("a", 30, dataclasses.replace(GREEDY, max_tokens=10))])
    how = KVEviction(kept=20, sinks=4, recent=10)
    assert seen == [(30, how), (35, how)]


def test_slots_with_evicted_kv_are_excluded_from_prefix_sharing() -> None:
    engine, runner = make_engine(kv_eviction_tokens=20, prefix_cache=True)
    first = make_request("a", 40, LONG)
    run(engine, [first])
    assert runner.held_tokens() == 0
    again = make_request("b", [*first.prompt_token_ids, *first.output_token_ids][:60], LONG)
    assert run(engine, [again]) == [alone(again)]
    assert engine.stats().prefix_hits == 0


def test_samples_share_the_prompt_before_its_kv_is_evicted() -> None:
    engine, _ = make_engine(kv_eviction_tokens=20, prefix_cache=True)
    prompt = make_request("a", 60).prompt_token_ids
    samples = [make_request(name, prompt, LONG) for name in "abcd"]
    assert run(engine, samples) == [alone(samples[0])] * 4
    assert engine.stats().prefix_cached_tokens == 3 * 59


def test_a_preempted_request_is_computed_whole_and_evicted_again() -> None:
    engine, _ = make_engine(kv_eviction_tokens=20, kv_tokens=110, max_slots=2)
    requests = [make_request(name, 50, dataclasses.replace(GREEDY, max_tokens=50)) for name in "ab"]
    low = make_request("c", 80, dataclasses.replace(GREEDY, max_tokens=20))
    assert run(engine, [low, *requests]) == [alone(request) for request in (low, *requests)]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (EngineConfig(kv_eviction_tokens=9), "at least 10"),
        (EngineConfig(kv_eviction_tokens=40, attention_sinks=20), "at least 42"),
        (EngineConfig(kv_eviction_tokens=40, context_shift=True), "choose one"),
    ],
)
def test_more_kept_tokens_than_the_budget_are_refused(config: EngineConfig, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Engine(make_runner(), config)


def test_windows_must_fit_into_what_stays() -> None:
    runner = make_runner()
    runner.info = dataclasses.replace(runner.info, kv_groups=(WindowKV(1024, window=32),))
    with pytest.raises(UsageError, match="at least 64"):
        Engine(runner, EngineConfig(kv_eviction_tokens=63))
    Engine(runner, EngineConfig(kv_eviction_tokens=64)).close()


def test_runners_that_cannot_say_so_at_once() -> None:
    runner = make_runner()
    runner.info = dataclasses.replace(runner.info, evicts_kv=False)
    with pytest.raises(UsageError, match="cannot evict KV"):
        Engine(runner, EngineConfig(kv_eviction_tokens=64))
