"""The DRY penalty against a plain loop, as in its author's code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

SIZE = 5
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=24)


def reference(tokens: list[int], breakers: set[int], params: SamplingParams) -> npt.NDArray[np.float64]:
    """Return the penalty of each token's logit."""
    last_n = params.dry_penalty_last_n
    tokens = tokens[-last_n:] if last_n else tokens
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end:
            token = tokens[-1 - length]
            if tokens[end - length] != token or token in breakers:
                break
            length += 1
        follower = tokens[end + 1]
        if length and follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    lowered = np.zeros(SIZE)
    for token, length in longest.items():
        if length >= params.dry_allowed_length:
            lowered[token] = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    return lowered


@given(
    prompt=TOKENS,
    output=TOKENS,
    breakers=st.sets(st.integers(0, SIZE - 1), max_size=2),
    allowed=st.integers(1, 4),
    last_n=st.sampled_from([0, 1, 2, 7, 100]),
)
def test_penalties_are_those_of_the_plain_loop(
    prompt: list[int], output: list[int], breakers: set[int], allowed: int, last_n: int
) -> None:
    params = SamplingParams(dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    state = SamplingState(params, np.array(prompt, np.int64), dry_breakers=breakers)
    for token in output:
        state.observe(token)
    changed = state.processed(np.zeros(SIZE, np.float32))
    assert -changed == pytest.approx(reference(prompt + output, breakers, params), rel=1e-6)


@pytest.mark.parametrize("base", [1.0, 1.75])
def test_long_runs_cost_as_much_as_a_logit_can_lose(base: float) -> None:
    params = SamplingParams(dry_multiplier=2.0, dry_base=base)
    state = SamplingState(params, np.zeros(3000, np.int64))
    changed = state.processed(np.zeros(SIZE, np.float32))
    assert changed[0] == (-2.0 if base == 1.0 else np.float32(-1e30))
    assert not changed[1:].any()
