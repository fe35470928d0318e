"""Exact top-k without sorting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.engine.sampling.candidates import in_order, shortlist_above, top_candidates


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 2000),
    fractions=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    ties=st.booleans(),
)
def test_candidates_begin_with_the_exact_top_k(
    seed: int, vocab_size: int, fractions: list[float], ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(fractions), vocab_size)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    count = np.array([max(1, round(f * vocab_size)) for f in fractions])
    found = top_candidates(list(logits), count)
    for row, k in enumerate(count):
        expected = np.argsort(-logits[row], kind="stable")[:k]
        assert np.array_equal(found.token_ids[row, :k], expected)
        assert np.array_equal(found.logits[row, :k], logits[row][expected])


def test_few_candidates_are_looked_at_in_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 150_000).astype(np.float32)
    assert top_candidates([logits], np.array([50])).logits.shape[1] < 200


def test_tokens_that_are_impossible_are_no_candidates() -> None:
    """Of a row that a grammar masks, all others had been sorted: 10 ms for 150,000 tokens."""
    logits = np.full((2, 150_000), -np.inf, np.float32)
    logits[0, [7, 70_000, 149_999]] = [1, 3, 2]
    logits[1, :40] = np.arange(40)
    found = top_candidates(list(logits), np.array([20, 50]))
    assert found.logits.shape == (2, 40)
    assert found.token_ids[0, :3].tolist() == [70_000, 149_999, 7]
    assert np.isneginf(found.logits[0, 3:]).all()
    assert found.token_ids[1].tolist() == list(range(39, -1, -1))


def test_threshold_keeps_what_reaches_it_and_pads_shorter_rows() -> None:
    logits = np.array([[1, 5, 3], [9, 0, 0]], np.float32)
    found = in_order([shortlist_above(list(logits), np.array([3, 9], np.float32))])
    assert found.token_ids[0].tolist() == [1, 2]
    assert found.logits.tolist() == [[5, 3], [9, -np.inf]]
