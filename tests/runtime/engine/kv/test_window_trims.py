"""KV before the sliding window: when it is freed, and which prefixes the slot serves afterwards."""

from __future__ import annotations

import dataclasses

import pytest
from engine_kit import GREEDY, TRIM_STEP, alone, make_engine, make_request, make_runner, run

from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.chunk import CHUNK_TOKENS
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

WINDOW = 5
LONG = dataclasses.replace(GREEDY, max_tokens=60)
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def continued(name: str, request: Request, *tokens: int) -> Request:
    return make_request(name, [*request.prompt_token_ids, *request.output_token_ids, *tokens], GREEDY)


def test_windows_go_before_an_idle_slot_does() -> None:
    engine, runner = make_engine(prefix_cache=True, kv_tokens=120, window=WINDOW)
    idle = make_request("idle", 40, ONE)
    run(engine, [idle])
    busy = make_request("busy", 50, LONG)
    assert run(engine, [busy]) == [alone(busy)]
    assert engine.stats().kv_tokens == runner.held_tokens() <= 120
    again = continued("again", idle)
    assert run(engine, [again]) == [alone(again)]
    assert again.metrics.cached_tokens == 40


def test_windows_go_before_anybody_is_preempted() -> None:
    for window, preempted in ((0, True), (WINDOW, False)):
        engine, _ = make_engine(prefix_cache=True, kv_tokens=140, window=window, max_slots=2)
        requests = [make_request(name, 40, LONG) for name in "ab"]
        assert run(engine, requests) == [alone(request) for request in requests]
        assert (engine.stats().preemptions > 0) == preempted


def test_nothing_goes_while_there_is_room() -> None:
    engine, runner = make_engine(prefix_cache=True, window=WINDOW)
    run(engine, [make_request("a", 50, LONG)])
    assert engine.stats().kv_tokens == runner.held_tokens() == 109


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_always_keeps_little_more_than_the_window(prefix_cache: bool) -> None:
    engine, _ = make_engine(prefix_cache=prefix_cache, trims_always=prefix_cache, window=WINDOW)
    request = make_request("a", 30, LONG)
    expected, held = alone(request), []
    engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        held.append(engine.stats().kv_tokens)
    assert request.output_token_ids == expected
    assert max(held[1:]) <= WINDOW + TRIM_STEP * (3 + prefix_cache)


def test_a_continuation_hits_a_trimmed_prefix_and_an_earlier_branch_misses() -> None:
    engine, _ = make_engine(prefix_cache=True, trims_always=True, window=WINDOW)
    first = make_request("first", 50, ONE)
    run(engine, [first])
    near = make_request("near", [*first.prompt_token_ids[:44], 1, 2], ONE)
    early = make_request("early", [*first.prompt_token_ids[:20], 1, 2], ONE)
    last = continued("last", first, 7)
    for request, cached in ((near, 44), (early, 0), (last, 50)):
        assert run(engine, [request]) == [alone(request)]
        assert request.metrics.cached_tokens == cached


def test_a_trimmed_slot_does_not_stand_in_for_its_beginnings() -> None:
    engine, _ = make_engine(prefix_cache=True, trims_always=True, window=WINDOW)
    system = make_request("system", 12, ONE)
    longer = make_request("longer", [*system.prompt_token_ids, *range(40)], LONG)
    engine.add(longer)
    while not longer.output_token_ids:
        engine.step()
    engine.add(system)
    run(engine)
    assert engine.stats().idle_kv_tokens == 12 + longer.num_computed - 88
    other = make_request("other", [*system.prompt_token_ids, 99], ONE)
    assert run(engine, [other]) == [alone(other)]
    assert other.metrics.cached_tokens == 12


def test_no_request_waits_for_a_trimmed_beginning() -> None:
    engine, _ = make_engine(prefix_cache=True, trims_always=True, window=WINDOW)
    running = make_request("running", 80, LONG)
    engine.add(running)
    while not running.output_token_ids:
        engine.step()
    late = make_request("late", [*running.prompt_token_ids[:40], 1], ONE)
    engine.add(late)
    engine.step()
    assert late.slot is not None
    run(engine)
    assert late.output_token_ids == alone(late)


def test_the_source_of_a_copy_is_not_trimmed() -> None:
    engine, _ = make_engine(prefix_cache=True, kv_tokens=130, window=WINDOW, max_slots=2)
    first = make_request("first", 70, LONG)
    engine.add(first)
    for _ in range(6):
        engine.step()
    fork = make_request("fork", [*first.prompt_token_ids[:30], *range(20)], ONE)
    assert run(engine, [fork]) == [alone(fork)]
    assert fork.metrics.cached_tokens == 30
    assert first.output_token_ids == alone(first)


@pytest.mark.parametrize("swap_tokens", [0, 1000])
def test_a_trimmed_request_comes_back_from_the_tiers(swap_tokens: int) -> None:
    engine, runner = make_engine(
        prefix_cache=True,
        trims_always=True,
        window=WINDOW,
        trim_step=CHUNK_TOKENS,
        swap_tokens=swap_tokens,
    )
    request = make_request("a", 180, LONG)
    engine.add(request)
    while len(request.output_token_ids) < 20:
        engine.step()
    assert runner.held_tokens() == request.num_computed - CHUNK_TOKENS
    engine.scheduler.preempt(request)
    engine.scheduler.cache.clear(save=True)
    run(engine)
    assert request.output_token_ids == alone(request)
    assert engine.stats().kv_restored_tokens == (192 if swap_tokens else 0)


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(trim_windows="always", context_shift=True),
        EngineConfig(trim_windows="always", kv_eviction_tokens=20),
    ],
    ids=["slide", "eviction"],
)
def test_nothing_goes_where_tokens_are_dropped_otherwise(config: EngineConfig) -> None:
    runner = make_runner(window=WINDOW)
    trimmed: list[int] = []
    runner.trim = lambda slot, length: trimmed.append(length)  # type: ignore[method-assign]
    engine = Engine(runner, config)
    request = make_request("a", 50, LONG)
    assert run(engine, [request]) == [alone(request)]
    assert trimmed == []
