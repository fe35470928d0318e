"""One step in flight while the next one is planned: the same tokens, whatever the device does meanwhile."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from async_runner import AsyncRunner
from engine_kit import VOCAB, EvenTokens, alone, make_request, make_runner
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.providers.base import RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Grammar, Request
from carryall.runtime.types.sampling_params import SamplingParams

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 5, "seed": 3},
    {"top_p": 0.8, "temperature": 0.7, "seed": 4},
    {"min_p": 0.1, "seed": 5},
    {"seed": 6},  # the host draws from the whole row: the request has a row in every other step
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
    {"top_k": 5, "xtc_probability": 0.5, "seed": 7},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


class EvenBehind(EvenTokens):
    """A grammar that begins behind a token, and then allows even tokens."""

    def __init__(self, marker: int) -> None:
        self.begun, self._marker = False, marker

    def observe(self, token: int) -> None:
        assert not self.begun or token % 2 == 0
        self.begun = self.begun or token == self._marker

    def copy(self) -> EvenBehind:
        return self


def ahead(
    *, top_logits: int = 0, window: int = 0, config: EngineConfig | None = None, **faults: Any
) -> tuple[Engine, AsyncRunner]:
    options = NullOptions(
        vocab_size=VOCAB,
        kv_bytes_per_token=1,
        top_logits=top_logits,
        embedding_size=4,
        sliding_window=window,
        trim_step=64 * (window > 0),
    )
    runner = AsyncRunner(NullRunner(RunnerConfig(max_slots=4, context_length=256), options), **faults)
    return Engine(runner, config or EngineConfig(max_step_tokens=32)), runner


def step(engine: Engine) -> None:
    engine.step()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.kv_tokens_budget is None or stats.kv_tokens <= stats.kv_tokens_budget


def finish(engine: Engine, runner: AsyncRunner, requests: list[Request]) -> None:
    for _ in range(5000):
        if not engine.has_work:
            break
        step(engine)
    assert not engine.has_work
    assert runner.misuse == []
    engine.clear_prefix_cache()
    assert runner.model.held_tokens() == 0
    engine.close()
    assert runner.misuse == []


def test_steps_overlap_and_tokens_do_not_change() -> None:
    engine, runner = ahead(seconds=0.002)
    requests = [make_request(str(i), 5 + i, SamplingParams(temperature=0, max_tokens=20)) for i in range(4)]
    for request in requests:
        engine.add(request)
    finish(engine, runner, requests)
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]
    assert runner.overlaps >= 18  # of 20 steps


def test_a_step_returns_the_tokens_of_the_step_before_the_one_that_it_submits() -> None:
    engine, runner = ahead()
    request = make_request("a", 5, SamplingParams(temperature=0, max_tokens=5))
    engine.add(request)
    counts = []
    while engine.has_work:
        assert engine.step() == [request]
        counts.append(len(request.output_token_ids))
    assert counts == [1, 2, 3, 4, 5]
    assert runner.overlaps == 4
    engine.close()


def test_an_end_token_costs_a_row_whose_memory_is_freed_when_the_device_is_done() -> None:
    probe = make_request("a", 5, SamplingParams(temperature=0, max_tokens=20))
    end = alone(probe)[7]
    engine, runner = ahead(seconds=0.002, config=EngineConfig(max_step_tokens=32, prefix_cache=False))
    request = make_request("a", 5, probe.params, end_token_ids=[end])
    other = make_request("b", 6, SamplingParams(temperature=0, max_tokens=20))
    engine.add(request)
    engine.add(other)
    while not request.finished:
        engine.step()
    assert request.output_token_ids == alone(request)
    assert any(runner.model.hashes), "the slot is freed although a step uses it"
    finish(engine, runner, [request, other])
    assert other.output_token_ids == alone(other)


@pytest.mark.parametrize("wrong", [0.3, 1.0])
def test_a_token_that_the_device_drew_wrong_is_run_again(wrong: float) -> None:
    engine, runner = ahead(wrong=wrong)
    requests = [make_request(str(i), 5 + i, SamplingParams(temperature=0, max_tokens=20)) for i in range(3)]
    for request in requests:
        engine.add(request)
    finish(engine, runner, requests)
    assert runner.corrected > 5
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


@pytest.mark.parametrize("top_logits", [0, 16])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.9, "seed": 3}], ids=str)
def test_a_grammar_that_begins_while_the_next_step_is_in_flight_holds_its_token(
    options: dict[str, Any], top_logits: int
) -> None:
    params = SamplingParams(max_tokens=20, **options)
    prompt = make_request("a", 5).prompt_token_ids
    marker = alone(make_request("a", prompt, params))[3]
    tokens: list[list[int]] = []
    for _, runner in (ahead(), ahead(top_logits=top_logits, seconds=0.002)):
        runner.info = dataclasses.replace(runner.info, steps_ahead=len(tokens))
        engine = Engine(runner, EngineConfig(max_step_tokens=32))
        request = Request("a", prompt, params, late_grammar=EvenBehind(marker))
        engine.add(request)
        finish(engine, runner, [request])
        tokens.append(request.output_token_ids)
    assert tokens[0] == tokens[1]
    assert any(token % 2 for token in tokens[0][:4])
    assert all(token % 2 == 0 for token in tokens[0][4:])


def test_a_request_that_comes_while_others_run_gets_its_token_soon() -> None:
    engine, runner = ahead(seconds=0.002)
    first = make_request("a", 5, SamplingParams(temperature=0, max_tokens=40))
    engine.add(first)
    for _ in range(5):
        engine.step()
    second = make_request("b", 6, SamplingParams(temperature=0, max_tokens=4))
    engine.add(second)
    for _ in range(3):  # the step in flight, then that of its prompt
        engine.step()
    assert second.output_token_ids
    finish(engine, runner, [first, second])
    assert second.output_token_ids == alone(second)


def test_the_step_ahead_takes_no_more_memory_than_there_is() -> None:
    config = EngineConfig(max_step_tokens=32, prefix_cache=False, kv_bytes=60)
    engine, runner = ahead(seconds=0.001, config=config)
    requests = [make_request(str(i), 20, SamplingParams(temperature=0, max_tokens=25)) for i in range(2)]
    for request in requests:
        engine.add(request)
    finish(engine, runner, requests)
    assert engine.scheduler.preemptions
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


def test_windows_are_trimmed_while_nothing_is_in_flight() -> None:
    config = EngineConfig(max_step_tokens=32, prefix_cache=False)
    engine, runner = ahead(window=16, seconds=0.001, config=config)
    requests = [make_request(str(i), 20, SamplingParams(temperature=0, max_tokens=150)) for i in range(2)]
    for request in requests:
        engine.add(request)
    held = []
    while engine.has_work:
        engine.step()
        held.append(runner.model.held_tokens())
    assert runner.overlaps > 120
    assert max(held) < 2 * 130, "KV behind the windows stays"  # of 2 * 169
    finish(engine, runner, requests)
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


def test_steps_overlap_behind_a_prompt_with_log_probabilities() -> None:
    engine, runner = ahead(top_logits=16)
    request = make_request("a", 50, SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2))
    plain = Engine(make_runner(), EngineConfig(max_step_tokens=32))
    expected = make_request("a", request.prompt_token_ids, request.params)
    for each, on in ((expected, plain), (request, engine)):
        on.add(each)
        while on.has_work:
            on.step()
    assert runner.overlaps >= 17
    assert request.output_token_ids == expected.output_token_ids
    assert request.prompt_logprobs() == expected.prompt_logprobs()
    finish(engine, runner, [request])


def test_steps_overlap_while_a_grammar_compiles() -> None:
    engine, runner = ahead()
    compiled: Future[Grammar] = Future()
    prompt = make_request("late", 5).prompt_token_ids
    late = Request("late", prompt, SamplingParams(temperature=0, max_tokens=6), grammar=compiled)
    other = make_request("other", 6, SamplingParams(temperature=0, max_tokens=40))
    engine.add(late)
    engine.add(other)
    for _ in range(20):
        engine.step()
    assert runner.overlaps >= 18
    assert late.output_token_ids == []
    grammar = EvenBehind(-1)
    grammar.begun = True
    compiled.set_result(grammar)
    finish(engine, runner, [late, other])
    assert len(late.output_token_ids) == 6
    assert all(token % 2 == 0 for token in late.output_token_ids)
    assert other.output_token_ids == alone(other)


def test_a_failed_step_takes_the_one_after_it_along_and_both_are_run_again() -> None:
    engine, runner = ahead(faults=0.2, seed=1)
    requests = [make_request(str(i), 5 + i, SamplingParams(temperature=0, max_tokens=20)) for i in range(3)]
    for request in requests:
        engine.add(request)
    finish(engine, runner, requests)
    assert [request.output_token_ids for request in requests] == [alone(request) for request in requests]


def test_a_cancelled_request_leaves_at_once_and_its_slot_when_the_device_is_done() -> None:
    engine, runner = ahead(seconds=0.002, config=EngineConfig(max_step_tokens=32, prefix_cache=False))
    request = make_request("a", 5, SamplingParams(temperature=0, max_tokens=50))
    other = make_request("b", 6, SamplingParams(temperature=0, max_tokens=20))
    engine.add(request)
    engine.add(other)
    for _ in range(4):
        engine.step()
    assert engine.cancel("a") is request
    assert request.finish_reason == "cancelled"
    finish(engine, runner, [request, other])
    assert other.output_token_ids == alone(other)


def test_the_last_cancelled_request_leaves_nothing_in_flight() -> None:
    engine, runner = ahead(seconds=0.002, config=EngineConfig(max_step_tokens=32, prefix_cache=False))
    engine.add(make_request("a", 5, SamplingParams(temperature=0, max_tokens=50)))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    assert not engine.has_work
    assert runner.model.held_tokens() == 0
    engine.close()
    assert runner.misuse == []


def test_runners_without_the_ability_are_given_one_step_at_a_time() -> None:
    runner = make_runner()
    engine = Engine(runner, EngineConfig(max_step_tokens=32))
    request = make_request("a", 5)
    engine.add(request)
    engine.step()
    assert len(request.output_token_ids) == 1
    assert runner.forwards == 1


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_mix_of_requests_gets_the_tokens_that_each_gets_alone(data: st.DataObject) -> None:
    faults = data.draw(st.sampled_from([0.0, 0.0, 0.1]))
    engine, runner = ahead(
        top_logits=data.draw(st.sampled_from([0, 8])),
        seed=data.draw(st.integers(0, 99)),
        wrong=data.draw(st.sampled_from([0.0, 0.1, 0.5])),
        faults=faults,
        seconds=data.draw(st.sampled_from([0.0, 0.001])),
        config=EngineConfig(
            max_step_tokens=data.draw(st.integers(5, 40)),
            prefix_cache=data.draw(st.booleans()),
            kv_bytes=data.draw(st.sampled_from([None, 300])),
            swap_bytes=data.draw(st.sampled_from([0, 4000])),
        ),
    )
    requests: list[Request] = []
    for i in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 6))):
            step(engine)
        if requests and data.draw(st.integers(0, 5)) == 0:
            engine.cancel(requests[data.draw(st.integers(0, len(requests) - 1))].request_id)
            engine.check_integrity()
        way = data.draw(st.sampled_from(WAYS))
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 25)), **way)
        prompt = np.random.default_rng(i % 3).integers(0, VOCAB, data.draw(st.integers(1, 60))).tolist()
        ends = data.draw(st.sampled_from([(), range(0, VOCAB, 9)]))
        requests.append(make_request(str(i), prompt, params, end_token_ids=ends))
        engine.add(requests[-1])
    finish(engine, runner, requests)
    for request in requests:
        expected = alone(request)
        assert request.finish_reason != "error" or faults  # a step of one row is not repeated
        if request.finish_reason in ("cancelled", "error"):
            expected = expected[: len(request.output_token_ids)]
        assert request.output_token_ids == expected
