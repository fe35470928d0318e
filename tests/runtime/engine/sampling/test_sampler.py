"""The vectorised sampler against a plain slow one, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_sampler import keep, most_likely

from carryall.runtime.engine.sampling.sampler import NO_TOKEN, sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
EMPTY = np.empty(0, np.int64)


def random_logits(seed: int, vocab_size: int = 500, ties: bool = False) -> Logits:
    logits = np.random.default_rng(seed).normal(0, 3, vocab_size).astype(np.float32)
    return np.round(logits) if ties else logits


def state(prompt: npt.NDArray[np.int64] = EMPTY, **options: Any) -> SamplingState:
    return SamplingState(SamplingParams(**options), prompt)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ties=st.booleans(),
    vocab_size=st.sampled_from([1, 7, 129, 500]),
    temperature=st.sampled_from([0.0, 1e-9, 0.7, 100.0]),
    top_k=st.sampled_from([1, 20, 10_000]),
    top_p=st.sampled_from([0.9, 0.01]),
    min_p=st.sampled_from([0.0, 0.3]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
)
def test_options_mean_what_the_plain_reference_makes_of_them(
    seed: int, ties: bool, vocab_size: int, **options: Any
) -> None:
    logits = random_logits(seed, vocab_size, ties)
    one = state(seed=seed, **options)
    if one.params.greedy:
        expected, margin = most_likely(logits), 1.0
    else:
        expected, margin = keep(logits, one.filters()).draw(one.uniform())
    assume(margin > 1e-5)  # closer calls are a matter of rounding
    assert sample([logits], [one])[0].token_id == expected


def test_without_filters_every_token_comes_as_often_as_it_should() -> None:
    logits = np.log(np.repeat([0.1, 0.2, 0.3, 0.4], 100) / 100).astype(np.float32)
    states = [state(seed=seed) for seed in range(4000)]
    tokens = np.array([s.token_id for s in sample([logits] * len(states), states)])
    shares = np.bincount(tokens // 100, minlength=4) / len(tokens)
    assert np.abs(shares - [0.1, 0.2, 0.3, 0.4]).max() < 0.03


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_row_is_the_same_alone_and_in_any_batch(data: st.DataObject) -> None:
    options = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.5, 1.3]),
            "top_k": st.sampled_from([0, 5, 60]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "typical_p": st.sampled_from([1.0, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "mirostat": st.sampled_from([0, 0, 2]),
            "mirostat_tau": st.sampled_from([1.0, 6.0]),
            "xtc_probability": st.sampled_from([0.0, 1.0]),
            "xtc_threshold": st.sampled_from([0.001, 0.1]),
            "dry_multiplier": st.sampled_from([0.0, 2.0]),
            "logprobs": st.sampled_from([None, 3]),
            "seed": st.integers(0, 1000),
        }
    )
    rows = data.draw(st.lists(options, min_size=2, max_size=9))
    vocab_size = data.draw(st.sampled_from([300, 70_000]))  # the larger one is sampled in groups of three
    logits = [random_logits(i, vocab_size) for i in range(len(rows))]
    states = [state(np.arange(9) % 4, **row) for row in rows]
    together = sample(logits, states)
    assert together == [sample([row], [one])[0] for row, one in zip(logits, states, strict=True)]


def test_greedy_takes_the_lowest_of_equals_whatever_the_filters() -> None:
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert sample([logits], [state(temperature=0.0, top_k=3, top_p=0.1)])[0].token_id == 1


def test_the_runner_s_logits_are_not_changed() -> None:
    logits = random_logits(0)
    before = logits.copy()
    sample([logits], [state(np.arange(5), repetition_penalty=2.0, min_tokens=3, temperature=0.0, logprobs=2)])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_reported_for_their_row_only(bad: float, temperature: float) -> None:
    good, broken = random_logits(1), random_logits(2)
    broken[17] = bad
    states = [state(temperature=temperature, seed=1, logprobs=1) for _ in range(2)]
    first, second = sample([good, broken], states)
    assert first == sample([good], states[:1])[0]
    assert second.token_id == NO_TOKEN


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 700]] = 0.0
    for options in ({}, {"top_k": 900}, {"top_p": 0.99}, {"min_p": 1e-6}):
        states = [state(seed=seed, **options) for seed in range(50)]
        assert {s.token_id for s in sample([logits] * 50, states)} == {3, 700}


def test_seed_decides_the_draws_and_their_absence_does_not() -> None:
    logits = [random_logits(5)] * 30
    first = sample(logits, [state(seed=i) for i in range(30)])
    assert first == sample(logits, [state(seed=i) for i in range(30)])
    assert len({s.token_id for s in first}) > 5
    assert len({s.token_id for s in sample(logits, [state() for _ in range(30)])}) > 5


def test_draws_of_successive_tokens_are_uniform_and_unlike() -> None:
    one = state(seed=0)
    uniforms = []
    for _ in range(2000):
        uniforms.append(one.uniform())
        assert one.uniform() == uniforms[-1], "a draw repeated is the same draw"
        one.observe(0)
    assert abs(np.mean(uniforms) - 0.5) < 0.02
    assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.06
    assert 0 <= min(uniforms) < max(uniforms) < 1


def test_logprobs_of_named_tokens_come_with_their_ranks() -> None:
    logits = random_logits(3)
    order = np.argsort(-logits, kind="stable")
    named = (int(order[400]), int(order[0]))
    (result,) = sample([logits], [state(temperature=0.0, logprobs=1, logprob_token_ids=named)])
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    assert [(p.token_id, p.rank) for p in result.logprobs] == [(named[1], 1), (named[0], 401)]
    for entry in result.logprobs:
        assert entry.logprob == pytest.approx(math.log(probabilities[entry.token_id]), abs=1e-5)


def test_a_vectorised_processor_sees_the_rows_it_wants_and_changes_no_others() -> None:
    class Forbid:
        def wants(self, params: SamplingParams) -> bool:
            return "forbid" in params.extra_args

        def apply(self, logits: Logits, states: Sequence[SamplingState]) -> None:
            for row, one in zip(logits, states, strict=True):
                row[one.params.extra_args["forbid"]] = -np.inf

    logits = np.array([1, 2, 3], np.float32)
    states = [state(temperature=0.0, extra_args={"forbid": [2]}), state(temperature=0.0)]
    assert [s.token_id for s in sample([logits, logits], states, [Forbid()])] == [1, 2]
    assert logits.tolist() == [1, 2, 3]


def test_typical_tokens_of_a_large_vocabulary_are_never_forbidden_ones() -> None:
    logits = np.random.default_rng(0).normal(0, 1, 2000).astype(np.float32)
    logits[::2] = -np.inf
    states = [state(seed=seed, typical_p=0.5) for seed in range(200)]
    assert all(s.token_id % 2 for s in sample([logits] * len(states), states))
