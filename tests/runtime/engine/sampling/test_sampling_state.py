"""Penalties, masks and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from carryall.runtime.engine.sampling.sampler import sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams


def state(prompt: list[int], outputs: list[int], **options: Any) -> SamplingState:
    one = SamplingState(SamplingParams(temperature=0.0, **options), np.array(prompt, np.int64), {7, 8})
    for token in outputs:
        one.observe(token)
    return one


LOGITS = np.array([2.0, -1.0, 4.0, -3.0, 0.5, 0.0, 1.0, 9.0, 8.0, 3.0], np.float32)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    changed = state([0, 1, 1], [2, 3], repetition_penalty=2.0).processed(LOGITS)
    assert changed.tolist() == [1.0, -2.0, 2.0, -6.0, 0.5, 0.0, 1.0, 9.0, 8.0, 3.0]


def test_presence_and_frequency_penalties_count_only_the_output() -> None:
    changed = state([0, 0], [2, 2, 3], presence_penalty=0.5, frequency_penalty=0.25).processed(LOGITS)
    assert changed.tolist() == [2.0, -1.0, 3.0, -3.75, 0.5, 0.0, 1.0, 9.0, 8.0, 3.0]


def test_all_penalties_together_repetition_first() -> None:
    changed = state([4], [2], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5).processed(
        LOGITS
    )
    assert changed[2] == 4.0 / 2.0 - 1.5
    assert changed[4] == 0.25


def test_many_distinct_tokens_outgrow_the_first_arrays() -> None:
    tokens = list(np.random.default_rng(0).integers(0, 5000, 3000))
    one = state(tokens[:100], tokens[100:], frequency_penalty=1.0)
    counts = np.bincount(tokens[100:], minlength=5000)
    assert np.array_equal(one.processed(np.zeros(5000, np.float32)), -counts.astype(np.float32))


def test_end_tokens_are_masked_until_min_tokens_are_generated() -> None:
    assert sample([LOGITS], [state([1], [], min_tokens=2)])[0].token_id == 2
    assert sample([LOGITS], [state([1], [2], min_tokens=2)])[0].token_id == 2
    assert sample([LOGITS], [state([1], [2, 2], min_tokens=2)])[0].token_id == 7


def test_nothing_to_do_returns_the_very_logits() -> None:
    assert state([1], [2]).processed(LOGITS) is LOGITS
    assert state([1], [2, 2], min_tokens=2).processed(LOGITS) is LOGITS


def log_softmax(logits: Any) -> Any:
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_logprobs_are_of_the_unmodified_distribution_and_hold_the_chosen_token() -> None:
    one = state([7, 8], [7, 8], repetition_penalty=100.0, logprobs=2)
    (result,) = sample([LOGITS], [one])
    assert result.token_id == 2
    assert [(p.token_id, p.rank) for p in result.logprobs] == [(2, 3), (7, 1), (8, 2)]
    expected = log_softmax(LOGITS)
    assert [p.logprob for p in result.logprobs] == pytest.approx([expected[i] for i in (2, 7, 8)], abs=1e-6)


def test_zero_logprobs_reports_the_chosen_token_alone_and_none_nothing() -> None:
    assert [p.token_id for p in sample([LOGITS], [state([], [], logprobs=0)])[0].logprobs] == [7]
    assert sample([LOGITS], [state([], [])])[0].logprobs == ()


def test_ranks_of_equals_follow_their_ids() -> None:
    (result,) = sample([np.array([1, 5, 5, 5], np.float32)], [state([1], [], logprobs=4)])
    assert [(p.token_id, p.rank) for p in result.logprobs] == [(1, 1), (2, 2), (3, 3), (0, 4)]
