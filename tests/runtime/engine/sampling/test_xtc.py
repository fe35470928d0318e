"""XTC: the tokens it keeps, alone and after the other filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.random_sampling import sample_random
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

UNIFORMS = np.linspace(0, 1, 3000, endpoint=False)


def drawn(probabilities: list[float], **filters: Any) -> dict[int, float]:
    """Return the frequency of each token over evenly spaced uniforms."""
    logits = np.log(np.array(probabilities)).astype(np.float32)
    tokens = sample_random([logits] * len(UNIFORMS), [Filters(**filters)] * len(UNIFORMS), UNIFORMS).token_ids
    return {int(token): float(np.mean(tokens == token)) for token in np.unique(tokens)}


OTHERS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.001}, {"typical_p": 0.9999}]


@pytest.mark.long
@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_only_the_least_likely_of_the_top_choices_stays(others: dict[str, Any]) -> None:
    shares = drawn([0.05, 0.4, 0.2, 0.3, 0.05], xtc_threshold=0.15, **others)
    assert shares == pytest.approx({0: 1 / 6, 2: 4 / 6, 4: 1 / 6}, abs=0.002)


@pytest.mark.long
@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_a_single_likely_token_stays(others: dict[str, Any]) -> None:
    probabilities = [0.1, 0.6, 0.1, 0.1, 0.1]
    assert drawn(probabilities, xtc_threshold=0.3, **others) == drawn(probabilities, **others)


def test_likely_is_what_is_so_after_the_other_filters() -> None:
    assert drawn([0.15, 0.4, 0.14, 0.31], top_k=2, xtc_threshold=0.35).keys() == {3}
    shares = drawn([0.15, 0.4, 0.14, 0.31], xtc_threshold=0.35)
    assert shares == pytest.approx({0: 0.15, 1: 0.4, 2: 0.14, 3: 0.31}, abs=0.002)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_it_applies_as_often_as_asked_and_as_the_seed_says(seed: int) -> None:
    params = SamplingParams(xtc_probability=0.5, seed=seed)
    first, second = (SamplingState(params, np.empty(0, np.int64)) for _ in range(2))
    applied = []
    for _ in range(60):
        assert first.filters() == second.filters()
        applied.append(first.filters().xtc_threshold < 1)
        first.observe(0)
        second.observe(0)
    assert 6 < sum(applied) < 54
