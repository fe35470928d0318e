"""Sampling options from mappings."""

from __future__ import annotations

import pytest

from carryall.errors import InvalidSamplingError
from carryall.runtime.types.sampling_params import SamplingParams


def test_options_that_were_checked_before_are_checked_by_type_again() -> None:
    assert SamplingParams.from_dict({"n": 1, "seed": 3}) == SamplingParams(n=1, seed=3)
    for _ in range(2):
        with pytest.raises(InvalidSamplingError, match="n must be"):
            SamplingParams.from_dict({"n": True, "seed": 4})
        with pytest.raises(InvalidSamplingError, match="seed must be"):
            SamplingParams.from_dict({"n": 1, "seed": -1})


def test_requests_with_equal_options_keep_their_own_seeds() -> None:
    first, second = (SamplingParams.from_dict({"temperature": 0.5, "seed": seed}) for seed in (1, 2))
    assert (first.seed, second.seed) == (1, 2)
    assert SamplingParams.from_dict({"temperature": 0.5}).seed is None
    assert SamplingParams.from_dict({"stop": ["a"], "seed": 1}) == SamplingParams(stop=("a",), seed=1)
