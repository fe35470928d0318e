"""Layers with a state that cannot be cut: prefixes resume at checkpoints, and a hit equals a cold run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from engine_kit import GREEDY, VOCAB, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import PromptTooLongError, ProviderRuntimeError, UsageError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.speculation.prompt_lookup import PromptLookup
from carryall.runtime.types.sampling_params import SamplingParams

STATE = 30  # bytes; a token of KV has one
SIX = SamplingParams(temperature=0.0, max_tokens=6)


def make_runner(max_slots: int = 4, window: int = 0, trim_step: int = 8) -> NullRunner:
    options = NullOptions(
        vocab_size=VOCAB,
        kv_bytes_per_token=1,
        sliding_window=window,
        trim_step=trim_step * (window > 0),
        state_bytes=STATE,
    )
    return NullRunner(RunnerConfig(max_slots=max_slots, context_length=256), options)


def make_engine(
    max_slots: int = 4,
    window: int = 0,
    kv_bytes: int | None = None,
    step: int = 32,
    always: bool = False,
    speculates: bool = False,
    swap_bytes: int = 0,
) -> tuple[Engine, NullRunner]:
    runner = make_runner(max_slots, window, 64 if swap_bytes else 8)  # tiers move whole chunks
    config = EngineConfig(
        max_step_tokens=step,
        kv_bytes=kv_bytes,
        trim_windows="always" if always else "when_short",
        adaptive_speculation=False,
        swap_bytes=swap_bytes,
    )
    return Engine(runner, config, PromptLookup() if speculates else None), runner


def alone(request: Request) -> list[int]:
    """Return the tokens of the same request on a new engine without a prefix cache, in one piece."""
    engine = Engine(make_runner(1), EngineConfig(max_step_tokens=256, prefix_cache=False))
    copy = Request(request.request_id, request.prompt_token_ids, request.params)
    return run(engine, [copy])[0]


def ask(name: str, *tokens: int, resumption: Sequence[int] = ()) -> Request:
    request = make_request(name, list(tokens), SIX)
    request.resumption = resumption
    return request


def texts(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return found


def test_a_state_matters_and_cannot_be_cut() -> None:
    """The comparison below could not see states that change nothing."""
    runner, tokens = make_runner(), np.array(texts(0, 20))
    whole = runner.forward([Row(0, tokens, 0, 1, checkpoints=[9])])[0].copy()
    runner.copy_prefix(0, 1, 9)
    np.testing.assert_array_equal(runner.forward([Row(1, tokens[9:], 9)])[0], whole)
    expected = runner.forward([Row(1, tokens[:1], 20)])[0].copy()
    runner._states[0][20] += 1
    assert not np.array_equal(runner.forward([Row(0, tokens[:1], 20, checkpoints=[20])])[0], expected)
    for fault in (
        lambda: runner.forward([Row(0, tokens[10:], 10)]),
        lambda: runner.copy_prefix(0, 2, 10),
        lambda: runner.forward([Row(0, tokens[:1], 20, checkpoints=[10])]),
        lambda: runner.forward([Row(0, tokens[:1], 21, checkpoints=[22])]),
    ):
        with pytest.raises(ProviderRuntimeError, match=r"state|states"):
            fault()


def test_the_same_prompt_again_is_a_hit() -> None:
    engine, _ = make_engine()
    prompt = texts(1, 50)
    run(engine, [ask("first", *prompt)])
    again = ask("again", *prompt)
    assert run(engine, [again]) == [alone(again)]
    assert again.metrics.cached_tokens == 49  # the end of the prompt, but not the end of the answer


def test_the_next_turn_continues_the_answer_and_a_rewritten_answer_the_prompt() -> None:
    for rewritten, cached in ((False, 55), (True, 49)):
        engine, _ = make_engine()
        first = ask("first", *texts(1, 50))
        run(engine, [first])
        answer = [1, 2, 3] if rewritten else first.output_token_ids
        turn = ask("turn", *first.prompt_token_ids, *answer, *texts(2, 20))
        assert run(engine, [turn]) == [alone(turn)]
        assert turn.metrics.cached_tokens == cached


def test_where_texts_part_a_state_is_kept_at_the_second_of_them() -> None:
    engine, _ = make_engine()
    system = texts(3, 40)
    requests = [ask(str(i), *system, *texts(10 + i, 20)) for i in range(4)]
    for request, cached in zip(requests, (0, 0, 40, 40), strict=True):
        assert run(engine, [request]) == [alone(request)]
        assert request.metrics.cached_tokens == cached


def test_where_a_template_says_that_texts_part_a_state_is_kept_at_the_first_of_them() -> None:
    engine, _ = make_engine()
    system = texts(3, 40)
    requests = [ask(str(i), *system, *texts(10 + i, 20), resumption=[40]) for i in range(4)]
    for request, cached in zip(requests, (0, 40, 40, 40), strict=True):
        assert run(engine, [request]) == [alone(request)]
        assert request.metrics.cached_tokens == cached


def test_the_state_to_which_a_later_turn_goes_back_outlives_the_calls_between() -> None:
    engine, _ = make_engine()
    prompt = question = texts(3, 40)
    for call in range(6):
        prompt = [*prompt, *texts(10 + call, 20)]
        run(engine, [ask(str(call), *prompt, resumption=[40])])
    turn = ask("turn", *question, *texts(30, 20))
    assert run(engine, [turn]) == [alone(turn)]
    assert turn.metrics.cached_tokens == 40


@pytest.mark.parametrize("together", [True, False])
def test_a_copied_slot_keeps_the_states_of_its_source(together: bool) -> None:
    """The source of several samples, or of a fork, may go; the place where other texts leave it stays."""
    engine, _ = make_engine()
    system = texts(3, 40)
    prompt = [*system, *texts(4, 20)]
    first = ask("first", *prompt, resumption=[40])
    samples = [ask(f"sample {i}", *prompt, resumption=[40]) for i in range(2)]
    engine.add(first)
    while not first.output_token_ids:
        engine.step()
    source = first.slot
    assert source is not None
    if not together:
        run(engine)
    run(engine, samples)
    assert [sample.metrics.cached_tokens for sample in samples] == [59, 59]
    engine.scheduler.cache.evict(source)
    other = ask("other", *system, *texts(5, 20), resumption=[40])
    assert run(engine, [other]) == [alone(other)]
    assert other.metrics.cached_tokens == 40
    engine.check_integrity()


def test_no_state_is_promised_at_a_length_that_the_tiers_restore() -> None:
    engine, _ = make_engine(swap_bytes=10**6)
    prompt = texts(1, 140)
    run(engine, [ask("first", *prompt)])
    engine.scheduler.cache.clear(save=True)
    while not engine.stats().kv_saved_tokens:
        run(engine, [ask("while it is saved", 1, 2)])
    again = ask("again", *prompt, resumption=[30])
    assert run(engine, [again]) == [alone(again)]
    assert engine.stats().kv_restored_tokens == 128
    other = ask("other", *prompt[:30], *texts(2, 20))
    assert run(engine, [other]) == [alone(other)]


def test_conversations_in_turn_do_not_take_each_other_s_slot() -> None:
    engine, _ = make_engine(max_slots=3)
    shared = texts(3, 80)
    both = [[*shared, *texts(10 + i, 5)] for i in range(2)]
    for turn in range(4):
        for i, prompt in enumerate(both):
            request = ask(f"{turn}.{i}", *prompt, resumption=[80])
            assert run(engine, [request]) == [alone(request)]
            assert not turn or request.metrics.cached_tokens == len(prompt) - 5 - 1
            both[i] = [*prompt, *texts(100 + 10 * turn + i, 5)]


def test_states_are_in_the_books_and_in_the_budget() -> None:
    engine, runner = make_engine(kv_bytes=400)
    for i in range(6):
        request = ask(str(i), *texts(3, 40), *texts(20 + i, 20))
        assert run(engine, [request]) == [alone(request)]
        assert engine.stats().kv_tokens <= 400
        assert runner.kv_bytes <= 400
    assert engine.stats().prefix_hits > 0


def test_a_prompt_beside_whose_state_there_is_no_room_is_refused() -> None:
    engine, _ = make_engine(kv_bytes=100)
    fits = ask("fits", *texts(1, 60))
    assert run(engine, [fits]) == [alone(fits)]
    with pytest.raises(PromptTooLongError):
        engine.add(ask("long", *texts(1, 75)))
    with pytest.raises(UsageError, match="kv_bytes must be more than the 30 bytes of a sequence's state"):
        make_engine(kv_bytes=30)


@pytest.mark.parametrize("swap_bytes", [0, 10**6])
def test_a_request_gives_up_its_checkpoints_before_it_is_preempted(swap_bytes: int) -> None:
    engine, _ = make_engine(max_slots=2, kv_bytes=260, swap_bytes=swap_bytes)
    request = ask("near the budget", *texts(1, 198))
    assert run(engine, [request]) == [alone(request)]
    assert engine.stats().preemptions == 0
    turn = ask("turn", *request.prompt_token_ids, *texts(2, 20))  # takes over a slot that is full
    assert run(engine, [turn]) == [alone(turn)]
    engine.check_integrity()


def test_a_preempted_request_goes_on_at_its_state() -> None:
    engine, _ = make_engine(max_slots=2)
    request = make_request("a", texts(1, 40), GREEDY)
    engine.add(request)
    while len(request.output_token_ids) < 5:
        engine.step()
    computed = request.num_computed
    engine.scheduler.preempt(request)
    engine.step()
    assert request.num_computed > computed
    run(engine)
    assert request.output_token_ids == alone(request)


def test_a_prompt_cancelled_in_its_middle_leaves_its_state() -> None:
    engine, _ = make_engine(step=32)
    prompt = texts(1, 100)
    engine.add(ask("cancelled", *prompt))
    for _ in range(2):
        engine.step()
    engine.cancel("cancelled")
    again = ask("again", *prompt)
    assert run(engine, [again]) == [alone(again)]
    assert again.metrics.cached_tokens == 64
    engine.check_integrity()


def test_what_cuts_sequences_is_refused() -> None:
    with pytest.raises(UsageError, match="context_shift cuts sequences"):
        Engine(make_runner(), EngineConfig(context_shift=True))
    with pytest.raises(UsageError, match="evict"):
        Engine(make_runner(), EngineConfig(kv_eviction_tokens=20))


@pytest.mark.long
@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 180), st.integers(1, 30), st.integers(0, 5)),
        min_size=1,
        max_size=8,
    ),
    window=st.sampled_from([0, 5]),
    always=st.booleans(),
    kv_bytes=st.sampled_from([None, 260, 400]),
    max_slots=st.integers(1, 3),
    step=st.sampled_from([3, 16, 64]),
    speculates=st.booleans(),
    swap_bytes=st.sampled_from([0, 1500, 10**6]),
    resumption=st.lists(st.integers(1, 210), max_size=2).map(sorted),
)
def test_a_hit_equals_a_cold_run(
    turns: list[tuple[int, int, int, int]],
    window: int,
    always: bool,
    kv_bytes: int | None,
    max_slots: int,
    step: int,
    speculates: bool,
    swap_bytes: int,
    resumption: list[int],
) -> None:
    """Texts that share first tokens, after each other and at once, some preempted or cancelled."""
    engine, runner = make_engine(max_slots, window, kv_bytes, step, always, speculates, swap_bytes)
    shared = [texts(seed, 180) for seed in range(3)]
    requests, finished = [], []
    for number, (which, common, rest, steps) in enumerate(turns):
        prompt = [*shared[which][:common], *texts(100 + number, rest)]
        request = ask(str(number), *prompt, resumption=[n for n in resumption if n <= len(prompt)])
        requests.append(request)
        engine.add(request)
        for _ in range(steps):
            if engine.has_work:
                finished += engine.step()
                engine.check_integrity()
        if steps == 4 and request.slot is not None:
            engine.scheduler.preempt(request)
        if steps == 5:
            engine.cancel(request.request_id)
    run(engine)
    for request in requests:
        if request.finish_reason != "cancelled":
            assert request.output_token_ids == alone(request)
    if not speculates:  # a row with proposals keeps more states than the engine counts
        assert runner.kv_bytes == engine.stats().kv_tokens
