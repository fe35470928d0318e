"""Outputs that run in a circle are ended; others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_kit import toy_model

from carryall.errors import InvalidSamplingError
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.requests.request import LONGEST, SHORTEST, RepetitionGuard
from carryall.runtime.types.sampling_params import SamplingParams


def circles(tokens: list[int], times: int) -> bool:
    """The definition, without a state."""
    for period in range(1, LONGEST + 1):
        count = max(period * times, SHORTEST + period)
        end = tokens[-count:]
        if len(end) == count and all(a == b for a, b in zip(end, end[period:], strict=False)):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(2, 6),
    st.integers(1, 9),
)
@settings(max_examples=200)
def test_a_guard_notices_what_the_definition_says(
    before: list[int], sequence: list[int], times: int, repeats: int
) -> None:
    guard, tokens = RepetitionGuard(times), list[int]()
    for token in [*before, *sequence * repeats]:
        tokens.append(token)
        assert guard.observe(token) == circles(tokens, times)


def test_sequences_longer_than_the_longest_are_no_circle() -> None:
    guard = RepetitionGuard(2)
    assert not any(guard.observe(token) for token in list(range(LONGEST + 1)) * 5)
    guard = RepetitionGuard(2)
    assert any(guard.observe(token) for token in list(range(LONGEST)) * 2)


def test_a_request_in_a_circle_ends_as_if_it_were_too_long(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, context_length=512)) as llm:
        params = SamplingParams(temperature=0, max_tokens=400, allowed_token_ids=(65,), repetition_guard=4)
        (output,) = llm.generate("x", params)
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("length", "repetition")
        assert len(answer.token_ids) == SHORTEST + 1
        (free,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=60, allowed_token_ids=(65,)))
        assert len(free.outputs[0].token_ids) == 60


def test_once_is_no_repetition() -> None:
    with pytest.raises(InvalidSamplingError, match="at least 2"):
        SamplingParams(repetition_guard=1)
