"""The output of a request does not depend on other requests, chunks, preemption or failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import GREEDY, VOCAB, FailWhen, alone, make_engine, make_request, make_runner, run

from carryall.errors import PromptTooLongError, ProviderRuntimeError, QueueFullError, RequestError, UsageError
from carryall.providers.base import Row
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.types.sampling_params import SamplingParams

RANDOM = SamplingParams(max_tokens=15, seed=3, top_k=40, repetition_penalty=1.2)


def mixed(count: int = 9) -> list[Request]:
    """Return requests of many lengths, greedy and random."""
    return [make_request(f"r{i}", 1 + 11 * i % 40, GREEDY if i % 2 else RANDOM) for i in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("max_step_tokens", [4, 7, 32, 256])
@pytest.mark.parametrize("max_slots", [1, 3, 4])
def test_batch_equals_single_and_chunked_equals_whole(max_slots: int, max_step_tokens: int) -> None:
    engine, runner = make_engine(max_slots=max_slots, max_step_tokens=max_step_tokens)
    assert run(engine, mixed()) == [alone(request) for request in mixed()]
    assert runner.held_tokens() == 0


def test_preempted_equals_undisturbed() -> None:
    engine, _ = make_engine(kv_tokens=60)
    assert run(engine, mixed()) == [alone(request) for request in mixed()]
    assert engine.stats().preemptions > 3


def test_requests_of_any_length_leave_gaps_and_equal_undisturbed_ones() -> None:
    lengths = [60, 3, 2, 50, 40]  # slots in the middle end first
    requests = [make_request(str(n), 4, SamplingParams(temperature=0.0, max_tokens=n)) for n in lengths]
    engine, _ = make_engine(max_slots=5)
    assert run(engine, requests) == [alone(request) for request in requests]


def test_seeds_do_not_depend_on_the_batch_s_composition() -> None:
    request = make_request("x", 6, RANDOM)
    expected = alone(request)
    for others in (0, 1, 3, 8):
        engine, _ = make_engine()
        assert run(engine, [make_request(f"o{i}", 5 + i) for i in range(others)] + [request])[-1] == expected
        request = make_request("x", 6, RANDOM)


def test_only_the_request_at_fault_fails() -> None:
    requests = [make_request(str(i), [i, i + 10, 3], GREEDY) for i in range(4)]
    expected = [alone(request) for request in requests]
    poison = next(token for token in range(20, VOCAB) if not any(token in tokens for tokens in expected))
    requests[2] = make_request("2", [2, poison, 3], GREEDY)
    engine, runner = make_engine()
    runner.before_forward = FailWhen({poison})
    outputs = run(engine, requests)
    assert [outputs[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
    assert (requests[2].finish_reason, requests[2].error) == ("error", "device fell over")
    assert runner.held_tokens() == 0
    assert (engine.stats().failed, engine.stats().finished) == (1, 3)


def test_a_failure_in_the_middle_of_decoding_spares_the_neighbours() -> None:
    requests = [make_request(str(i), 4) for i in range(4)]
    expected = [alone(request) for request in requests]
    fifth = expected[1][5]
    spared = [i for i in range(4) if fifth not in [*requests[i].prompt_token_ids, *expected[i][:-1]]]
    engine, runner = make_engine()
    runner.before_forward = FailWhen({fifth})
    outputs = run(engine, requests)
    assert requests[1].finish_reason == "error"
    assert outputs[1] == expected[1][: expected[1].index(fifth) + 1]
    assert spared
    assert [outputs[i] for i in spared] == [expected[i] for i in spared]


def test_a_batch_failure_that_no_single_row_repeats_fails_no_request() -> None:
    requests = mixed(4)
    engine, runner = make_engine()

    def only_batches(rows: Sequence[Row]) -> None:
        if len(rows) > 1:
            raise ProviderRuntimeError("too wide")

    runner.before_forward = only_batches
    assert run(engine, requests) == [alone(request) for request in mixed(4)]


def test_a_request_alone_gets_its_error_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    request = make_request("0", [1, 2, 3], GREEDY)
    engine, runner = make_engine()
    runner.before_forward = FailWhen({2})
    run(engine, [request])
    assert request.error == "device fell over"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_step_that_is_tried_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = make_engine()
    runner.before_forward = FailWhen({20})
    run(engine, [make_request("0", [1, 20, 3], GREEDY), make_request("1", [1, 2, 3], GREEDY)])
    assert "a step of 2 rows failed: device fell over" in caplog.messages


def test_logits_that_are_no_numbers_fail_only_their_request() -> None:
    requests = mixed(3)
    engine, runner = make_engine()
    forward = runner.forward

    def poisoned(rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        logits = forward(rows)
        for row, out in zip(rows, logits, strict=True):
            if row.tokens[0] == requests[1].prompt_token_ids[0]:
                out[:] = np.nan
        return logits

    runner.forward = poisoned  # type: ignore[method-assign]
    outputs = run(engine, requests)
    assert [outputs[0], outputs[2]] == [alone(mixed(3)[0]), alone(mixed(3)[2])]
    assert requests[1].error
    assert requests[1].error.startswith("no token can be sampled: the logits are not finite numbers")


def test_cancelling_frees_the_slot_and_its_memory_at_once() -> None:
    engine, runner = make_engine(max_slots=1)
    running, waiting = make_request("a", 5), make_request("b", 5)
    engine.add(running)
    engine.add(waiting)
    engine.step()
    assert runner.held_tokens() == 5
    assert engine.cancel("a") is running
    assert runner.held_tokens() == 0
    assert (running.finish_reason, len(running.output_token_ids)) == ("cancelled", 1)
    assert engine.cancel("b") is waiting
    assert engine.cancel("b") is None
    assert not engine.has_work
    engine.check_integrity()


def test_requests_end_by_length_end_token_or_the_context() -> None:
    tokens = alone(make_request("a", 6))
    by_token = make_request("a", 6, end_token_ids={tokens[4]})
    engine, _ = make_engine()
    assert run(engine, [by_token]) == [tokens[:5]]
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", tokens[4])
    by_context = make_request("a", 6, SamplingParams(temperature=0.0, max_tokens=None))
    engine, _ = make_engine(context_length=10)
    assert run(engine, [by_context]) == [tokens[:4]]
    assert (by_context.finish_reason, by_context.stop_reason) == ("length", None)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine, _ = make_engine(context_length=10)
    run(engine, [make_request("fits", 9)])
    with pytest.raises(PromptTooLongError, match="is too long: 10 tokens > 9 maximum: the context holds 10"):
        engine.add(make_request("long", 10))
    engine, _ = make_engine(kv_tokens=20)
    assert len(run(engine, [make_request("fits", 15, SamplingParams(max_tokens=None))])[0]) == 6
    with pytest.raises(PromptTooLongError, match="21 tokens > 20 maximum: the KV cache's byte budget"):
        engine.add(make_request("long", 21))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt is empty"),
        ([-1], r"token id -1 is outside"),
        ([1, VOCAB], rf"token id {VOCAB} is outside"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make_engine()[0].add(make_request("bad", prompt))


def test_ids_are_unique_among_those_in_the_engine() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(make_request("a"))
    run(engine)
    engine.add(make_request("a"))


def test_queue_limit_counts_those_beyond_the_slots() -> None:
    engine, _ = make_engine(max_slots=2, max_queue=1)
    for name in "abc":
        engine.add(make_request(name))
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        engine.add(make_request("d"))
    run(engine)
    engine.add(make_request("d"))


def test_the_tokens_to_be_computed_are_limited() -> None:
    """A request alone is admitted whatever its length, and what is cached does not count."""
    runner = make_runner(max_slots=2, context_length=1024)
    engine = Engine(runner, EngineConfig(max_queued_tokens=300, max_step_tokens=32))
    engine.add(make_request("a", 400))
    with pytest.raises(QueueFullError, match=r"400 tokens .* with 8 more they exceed max_queued_tokens, 300"):
        engine.add(make_request("b", 8))
    for _ in range(4):
        engine.step()  # 128 tokens
    engine.add(make_request("c", 20))
    with pytest.raises(QueueFullError, match=r"292 tokens .* with 9 more"):
        engine.add(make_request("d", 9))
    run(engine)
    engine.add(make_request("e", 200))
    known = make_request("a", 400).prompt_token_ids[:399]
    engine.add(make_request("f", known))  # its last token is new
    engine.add(make_request("g", 99))
    with pytest.raises(QueueFullError, match="300 tokens"):
        engine.add(make_request("h", 1))
    engine.cancel("g")
    engine.add(make_request("h", 1))
    run(engine)
    engine.check_integrity()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_prompt_counts_once_for_all_its_outputs_if_it_is_computed_once(prefix_cache: bool) -> None:
    config = EngineConfig(max_queued_tokens=100, max_step_tokens=32, prefix_cache=prefix_cache)
    engine = Engine(make_runner(max_slots=4, context_length=1024), config)
    prompt = make_request("a", 90).prompt_token_ids
    engine.add(make_request("a", prompt))
    for number in (1, 2, 3):  # all or none: the first was admitted
        engine.add(make_request(f"a-{number}", prompt, first_sample="a"))
    queued = 93 if prefix_cache else 360
    with pytest.raises(QueueFullError, match=rf"{queued} tokens .* with 8 more"):
        engine.add(make_request("b", 8))
    run(engine)
    engine.add(make_request("b", 100))


def test_steps_too_small_for_the_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="max_step_tokens is 3, less than the 4 slots"):
        Engine(make_runner(max_slots=4), EngineConfig(max_step_tokens=3))


@pytest.mark.parametrize(("preferred", "steps"), [(16, 3), (512, 1), (2, 9)])
def test_a_step_has_as_many_tokens_as_the_runner_prefers(preferred: int, steps: int) -> None:
    """But one for each slot at least."""
    runner = make_runner(max_slots=5)
    runner.info = dataclasses.replace(runner.info, step_tokens=preferred)
    engine = Engine(runner)
    engine.add(make_request("a", 45, SamplingParams(max_tokens=1)))
    count = 0
    while engine.has_work:
        engine.step()
        count += 1
    assert count == steps


def test_statistics_add_up() -> None:
    engine, _ = make_engine(max_slots=2)
    requests = mixed(5)
    for request in requests:
        engine.add(request)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.slots, stats.steps) == (2, 3, 2, 1)
    assert stats.kv_tokens == stats.kv_bytes == sum(r.num_computed for r in requests)
    run(engine)
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert stats.generated_tokens == sum(len(r.output_token_ids) for r in requests)
    assert stats.computed_tokens == stats.prompt_tokens + stats.generated_tokens - 5
    assert (stats.running, stats.waiting, stats.kv_tokens, stats.finished) == (0, 0, 0, 5)


def test_closing_ends_all_requests_and_frees_the_runner() -> None:
    engine, runner = make_engine(max_slots=1)
    requests = [make_request("a"), make_request("b")]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.close() == requests
    assert runner.closed
    assert [r.finish_reason for r in requests] == ["cancelled", "cancelled"]


def test_the_runners_capacity_limits_the_batch() -> None:
    runner = make_runner(max_slots=4)
    runner.info = dataclasses.replace(runner.info, kv_tokens=60)
    engine = Engine(runner, EngineConfig(prefix_cache=False))
    assert engine.max_length == 61
    requests = [make_request(name, 25) for name in "abcd"]
    assert run(engine, requests) == [alone(request) for request in requests]
    assert engine.stats().preemptions > 0
    assert Engine(runner, EngineConfig(kv_bytes=40)).max_length == 41
