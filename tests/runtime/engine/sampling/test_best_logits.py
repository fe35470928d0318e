"""Sampling from the best logits equals sampling from all logits, or is declined."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import ROUNDING, keep, most_likely, whole_rows_used

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import BestLogits
from carryall.runtime.engine.sampling.lowered_logits import lowered_logits
from carryall.runtime.engine.sampling.sampler import NO_TOKEN, Sample, best_may_suffice, sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
EMPTY = np.empty(0, np.int64)
pytestmark = pytest.mark.usefixtures("draws")


def not_asked() -> Logits:
    raise AssertionError("all logits were asked for")


def sample_best(rows: Sequence[BestLogits], states: Sequence[SamplingState]) -> list[Sample | None]:
    """Return per row its sample, or None if all logits of the row were asked for."""
    asked: set[int] = set()

    def refuse(i: int) -> Logits:
        asked.add(i)
        raise ProviderRuntimeError("all logits were asked for")

    refusing = [dataclasses.replace(row, whole=functools.partial(refuse, i)) for i, row in enumerate(rows)]
    samples = sample(refusing, states)
    return [None if i in asked else drawn for i, drawn in enumerate(samples)]


def best_of(logits: Logits, count: int) -> BestLogits:
    """Return the best logits as a device gives them, with their log-sum-exp in float32."""
    order = np.argsort(-logits, kind="stable")[:count]
    largest = logits.max()
    logsumexp = np.float32(largest + np.log(np.exp(logits - largest).sum()))
    return BestLogits(order, logits[order], float(logsumexp), len(logits), not_asked)


def random_logits(seed: int, spread: float, *, ties: bool = False, vocab_size: int = 3000) -> Logits:
    logits = np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)
    return np.round(logits) if ties else logits


def check_equal(got: Sample, expected: Sample) -> None:
    assert got.token_id == expected.token_id
    assert [(p.token_id, p.rank) for p in got.logprobs] == [(p.token_id, p.rank) for p in expected.logprobs]
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def check_reference(got: Sample, logits: Logits, state: SamplingState) -> None:
    if state.params.greedy:
        assert got.token_id == most_likely(logits)
        return
    with whole_rows_used() as used:
        sample([logits], [state])
    kept = keep(logits, state.filters())
    expected, margin = kept.draw(state.uniform())
    if margin > ROUNDING and kept.margin > ROUNDING:
        assert got.token_id in kept.tokens
        assert got.token_id == expected or used


ROWS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**31),
    "spread": st.sampled_from([0.5, 2.0, 3.0, 6.0]),
    "ties": st.booleans(),
    "count": st.sampled_from([1, 8, 64, 600]),
}


@pytest.mark.long
@settings(deadline=None, max_examples=400)
@given(
    **ROWS,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 3.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 900)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    xtc=st.booleans(),
    logprobs=st.one_of(st.none(), st.integers(0, 8)),
)
def test_equals_sampling_from_all_logits(
    seed: int, spread: float, ties: bool, count: int, **options: Any
) -> None:
    if options.pop("xtc"):
        options |= {"xtc_probability": 0.5, "xtc_threshold": 0.1}
    state = SamplingState(SamplingParams(seed=seed, **options), EMPTY)
    logits = random_logits(seed, spread, ties=ties)
    if not best_may_suffice(state, count):
        return
    (got,) = sample_best([best_of(logits, count)], [state])
    if got is not None:
        check_equal(got, sample([logits], [state])[0])
        check_reference(got, logits, state)


class Even:
    """A grammar that allows even tokens."""

    lowers = True

    def observe(self, token: int) -> None:
        """Do nothing."""

    def apply(self, logits: Logits) -> None:
        logits[1::2] = -np.inf


@pytest.mark.long
@settings(deadline=None, max_examples=400)
@given(
    **ROWS,
    grammar=st.booleans(),
    seen=st.lists(st.integers(0, 80), max_size=30),  # ranks of tokens of the text
    options=st.fixed_dictionaries(
        {"temperature": st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 3.0))},
        optional={
            "top_k": st.integers(1, 900),
            "top_p": st.floats(0.01, 0.999),
            "min_p": st.floats(0.001, 1.0),
            "logprobs": st.integers(0, 8),
            "repetition_penalty": st.floats(1.0, 20.0),
            "presence_penalty": st.floats(0.0, 2.0),
            "frequency_penalty": st.floats(0.0, 2.0),
            "no_repeat_ngram_size": st.integers(1, 3),
            "dry_multiplier": st.floats(0.1, 3.0),
            "xtc_probability": st.just(0.5),
        },
    ),
    bias=st.lists(st.tuples(st.integers(0, 80), st.floats(-100.0, 0.0)), max_size=4),
)
def test_lowered_logits_equal_sampling_from_all(
    seed: int,
    spread: float,
    ties: bool,
    count: int,
    grammar: bool,
    seen: list[int],
    options: dict[str, Any],
    bias: list[tuple[int, float]],
) -> None:
    logits = random_logits(seed, spread, ties=ties)
    ranked = np.argsort(-logits, kind="stable")
    if bias:
        options |= {"logit_bias": {int(ranked[rank]): value for rank, value in bias}}
    state = SamplingState(SamplingParams(seed=seed, **options), ranked[seen[::2]])
    for rank in seen[1::2]:
        state.observe(int(ranked[rank]))
    if grammar:
        state.restrict(Even())
    if not best_may_suffice(state, count):
        return
    expected = sample([logits], [state])[0]
    (got,) = sample_best([best_of(logits, count)], [state])
    if got is not None:
        check_equal(got, expected)
    if not state.processors:
        return
    scratch = np.full(len(logits), -np.inf, np.float32)
    left = lowered_logits(best_of(logits, count), state, scratch)
    assert (scratch == -np.inf).all()
    if left is not None:
        whole = state.processed(logits)
        assert left.token_ids.tolist() == np.argsort(-whole, kind="stable")[: len(left.logits)].tolist()
        assert np.array_equal(left.logits, whole[left.token_ids])
        sums = np.exp(whole.astype(np.float64) - float(whole.max())).sum()
        assert left.logsumexp >= float(whole.max()) + np.log(sums) - ROUNDING


def test_logits_that_a_processor_raises_are_asked_for() -> None:
    logits = random_logits(0, 3.0)
    state = SamplingState(SamplingParams(temperature=0.0, logit_bias={5: 2.0}), EMPTY)
    assert sample_best([best_of(logits, 64)], [state]) == [None]


def test_a_processor_that_fails_fails_its_row_alone() -> None:
    class Failing(Even):
        def apply(self, logits: Logits) -> None:
            raise ValueError("no mask")

    logits = random_logits(0, 3.0)
    states = [SamplingState(SamplingParams(temperature=0.0), EMPTY) for _ in range(3)]
    for state, grammar in zip(states, (Even(), Failing(), Even()), strict=True):
        state.restrict(grammar)
    rows = [dataclasses.replace(best_of(logits, 64), whole=lambda: logits)] * 3
    first, failed, last = sample(rows, states)
    assert (failed.token_id, states[1].error) == (NO_TOKEN, "Failing failed: ValueError('no mask')")
    assert first == last == sample([logits], [states[0]])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "logprobs": 8},
        {"top_k": 40},
        {"top_k": 64, "top_p": 0.9, "min_p": 0.01, "temperature": 1.7, "logprobs": 64},
        {"top_k": 200, "top_p": 0.8},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.6, "logprobs": 2},
        {"top_p": 0.5, "temperature": 1.2},
        {"min_p": 0.1},
        {"top_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
        {"top_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_the_usual_options_need_no_more_than_the_best(options: dict[str, Any]) -> None:
    suffice = 0
    for seed in range(50):
        logits = random_logits(seed, 6.0)
        state = SamplingState(SamplingParams(seed=seed, **options), np.argsort(-logits)[::3])
        assert best_may_suffice(state, 64)
        (got,) = sample_best([best_of(logits, 64)], [state])
        if got is not None:
            suffice += 1
            check_equal(got, sample([logits], [state])[0])
    assert suffice >= 40


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 33},
        {"xtc_probability": 0.5},
        {"top_k": 8, "typical_p": 0.5},
        {"mirostat": 2},
        {"temperature": 0.0, "repetition_penalty": 0.9},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": -0.1},
        {"temperature": 0.0, "logit_bias": {3: 5.0}},
        {"temperature": 0.0, "logprobs": 33},
        {"temperature": 0.0, "logprobs": 1, "logprob_token_ids": [7]},
    ],
    ids=str,
)
def test_what_needs_all_logits(options: dict[str, Any]) -> None:
    assert not best_may_suffice(SamplingState(SamplingParams(**options), EMPTY), 32)


def test_a_batch_processor_needs_all_logits() -> None:
    class Wanting:
        def wants(self, params: SamplingParams) -> bool:
            return True

        def apply(self, logits: Logits, states: object) -> None: ...

    state = SamplingState(SamplingParams(temperature=0.0), EMPTY)
    assert best_may_suffice(state, 64)
    assert not best_may_suffice(state, 64, [Wanting()])


def test_flat_rows_and_numbers_that_are_none_are_left_to_all_logits() -> None:
    state = SamplingState(SamplingParams(top_p=0.9, seed=1), EMPTY)
    assert sample_best([best_of(random_logits(0, 0.1), 64)], [state]) == [None]
    greedy = SamplingState(SamplingParams(temperature=0.0), EMPTY)
    broken = random_logits(0, 1.0)
    broken[5] = np.nan
    assert sample_best([best_of(broken, 64)], [greedy]) == [None]


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 40), spread=st.sampled_from([2.0, 4.0, 6.0]))
def test_a_row_does_not_depend_on_the_rows_beside_it(seed: int, rows: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 40},
        {"top_p": 0.9, "temperature": 0.7},
        {"min_p": 0.1, "temperature": 1.3},
        {"top_p": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.1},
        {"top_k": 200, "top_p": 0.8, "logprobs": 3},
    ]
    states = [
        SamplingState(SamplingParams(seed=seed + i, **choices[random.integers(len(choices))]), EMPTY)
        for i in range(rows)
    ]
    size, count = random.choice([700, 3000]), random.choice([8, 64, 600])
    best = [best_of(random_logits(seed + i, spread, vocab_size=int(size)), int(count)) for i in range(rows)]
    alone = [sample_best([row], [state])[0] for row, state in zip(best, states, strict=True)]
    assert sample_best(best, states) == alone
