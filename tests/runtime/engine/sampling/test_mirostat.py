"""Mirostat 2: the tokens it keeps, and that the mean surprise reaches the target."""

from __future__ import annotations

import numpy as np
import pytest

from carryall.errors import InvalidSamplingError
from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.random_sampling import sample_random
from carryall.runtime.engine.sampling.sampler import sample
from carryall.runtime.engine.sampling.sampling_state import Mirostat, SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

EMPTY = np.empty(0, np.int64)


def test_surprise_is_that_of_the_token_at_the_temperature() -> None:
    logits = np.array([0.0, 1.0, 3.0], np.float32)
    weights = np.exp(logits / 0.5)
    expected = -np.log2(weights / weights.sum())
    filters = Filters(max_surprise=100.0, temperature=0.5)
    drawn = sample_random([logits] * 200, [filters] * 200, np.linspace(0, 0.999, 200))
    assert set(drawn.token_ids.tolist()) == {0, 1, 2}
    assert drawn.surprises == pytest.approx(expected[drawn.token_ids], abs=1e-5)


@pytest.mark.parametrize("target", [4.0, 6.0])
def test_the_mean_surprise_comes_to_the_target(target: float) -> None:
    """A Zipf distribution of 10.5 bits of entropy, as in the paper's experiments."""
    logits = -np.log(np.arange(1, 20_001)).astype(np.float32)
    params = SamplingParams(mirostat=2, mirostat_tau=target, seed=1)
    state = SamplingState(params, EMPTY)
    seen = []
    for _ in range(600):
        (chosen,) = sample([logits], [state])
        assert chosen.surprise is not None
        state.observe(chosen.token_id, chosen.surprise)
        seen.append(chosen.surprise)
    assert np.mean(seen[100:]) == pytest.approx(target, abs=0.15)


def test_the_bound_moves_by_the_error() -> None:
    mirostat = Mirostat(3.0, 0.5)
    mirostat.observe(5.0)
    assert mirostat.max_surprise == 6.0 - 0.5 * 2.0


def test_there_is_no_other_version() -> None:
    with pytest.raises(InvalidSamplingError, match=r"mirostat must be 0 \(off\) or 2, not 1"):
        SamplingParams(mirostat=1)
