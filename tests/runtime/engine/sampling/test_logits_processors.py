"""Each processor against a slow search through the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engine_kit import VOCAB, alone, make_engine, make_request, make_runner, run
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import InvalidSamplingError
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.logits_processors import Logits
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

SIZE = 6
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=20)
SEQUENCES = st.lists(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4).map(tuple), max_size=4)


def forbidden(state: SamplingState) -> set[int]:
    logits = state.processed(np.zeros(SIZE, np.float32))
    return set(np.flatnonzero(np.isneginf(logits)).tolist())


@given(prompt=TOKENS, output=TOKENS, size=st.integers(1, 4))
def test_no_ngram_is_repeated(prompt: list[int], output: list[int], size: int) -> None:
    state = SamplingState(SamplingParams(no_repeat_ngram_size=size), np.array(prompt, np.int64))
    for token in output:
        state.observe(token)
    history = prompt + output
    seen = {tuple(history[i : i + size]) for i in range(len(history) - size + 1)}
    tail = tuple(history[len(history) - size + 1 :]) if size > 1 else ()
    expected = {token for token in range(SIZE) if (*tail, token) in seen}
    assert forbidden(state) == (expected if len(history) >= size - 1 else set())


@given(output=TOKENS, words=SEQUENCES)
def test_no_bad_word_is_completed(output: list[int], words: list[tuple[int, ...]]) -> None:
    state = SamplingState(SamplingParams(), np.zeros(1, np.int64), (), words)
    for token in output:
        state.observe(token)
    completing = {t for t in range(SIZE) for word in words if (*output, t)[-len(word) :] == word}
    assert forbidden(state) == completing


@given(
    allowed=st.sets(st.integers(0, SIZE - 1)),
    bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-9, 9)),
)
def test_allowed_tokens_and_biases(allowed: set[int], bias: dict[int, float]) -> None:
    params = SamplingParams(allowed_token_ids=tuple(allowed), logit_bias=bias)
    logits = np.arange(SIZE, dtype=np.float32)
    changed = SamplingState(params, np.zeros(1, np.int64)).processed(logits)
    for token in range(SIZE):
        expected = np.float32(token) + np.float32(bias.get(token, 0.0))
        assert changed[token] == (expected if not allowed or token in allowed else -np.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_hold_in_the_engine(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=30,
        no_repeat_ngram_size=2,
        allowed_token_ids=tuple(range(10)),
        bad_words=((3, 4), (5,)),
    )
    engine, _ = make_engine()
    request = Request("a", [100], params, bad_words={(3, 4), (5,)})
    (tokens,) = run(engine, [request])
    pairs = list(pairwise(tokens))
    assert len(tokens) == 30
    assert set(tokens) <= set(range(10)) - {5}
    assert len(set(pairs)) == len(pairs)
    assert (3, 4) not in pairs


def test_a_request_whose_options_forbid_everything_fails_alone() -> None:
    engine, _ = make_engine()
    params = SamplingParams(allowed_token_ids=(1,), no_repeat_ngram_size=1, temperature=0.0)
    nothing = make_request("a", [1, 2], params)
    other = make_request("b", 5)
    run(engine, [nothing, other])
    assert nothing.error
    assert nothing.error.endswith("the options forbid all tokens")
    assert other.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "token id 256"),
        ({"allowed_token_ids": (-1,)}, "token id -1"),
        ({"bad_words": [(1, 999)]}, "token id 999"),
        ({"stop_token_ids": (300,)}, "token id 300"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSamplingError, match=words):
        make_engine()[0].add(make_request("a", 5, SamplingParams(**options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be within"),
        ({"bad_words": "abc"}, "bad_words must be a list"),
        ({"bad_words": [""]}, "must not be empty"),
        ({"bad_words": [[1.5]]}, "a bad word must be an integer, not 1.5"),
        ({"typical_p": 0.0}, "typical_p must be a number of more than 0"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size must be an integer"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSamplingError, match=words):
        SamplingParams(**options)


def test_json_s_text_keys_are_token_ids() -> None:
    assert SamplingParams.from_dict({"logit_bias": {"7": -100}}).logit_bias == {7: -100.0}


def test_own_functions_see_the_tokens_and_change_the_logits_in_their_order() -> None:
    seen = []

    def only_even(token_ids: list[int], logits: Logits) -> Logits:
        seen.append(token_ids)
        logits[1::2] = -np.inf
        return logits

    def only_high(token_ids: list[int], logits: Logits) -> Logits:
        return np.where(np.arange(len(logits)) >= 4, logits, -np.inf)

    params = SamplingParams(logits_processors=(only_even, only_high))
    state = SamplingState(params, np.array([1, 2], np.int64))
    assert forbidden(state) == {0, 1, 2, 3, 5}
    state.observe(4)
    assert forbidden(state) == {0, 1, 2, 3, 5}
    assert seen == [[], [4]]


@pytest.mark.parametrize("result", [None, np.zeros(VOCAB + 1), 3.0])
def test_a_function_that_fails_fails_only_its_own_request(result: Any) -> None:
    engine, _ = make_engine()
    bad = make_request("bad", params=SamplingParams(logits_processors=(lambda tokens, logits: result,)))
    good = make_request("good")
    run(engine, [bad, good])
    assert bad.finish_reason == "error"
    assert "logits processor <function" in str(bad.error)
    assert good.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_s_processor_that_fails_fails_the_requests_that_it_wants(temperature: float) -> None:
    class Failing:
        def wants(self, params: SamplingParams) -> bool:
            return bool(params.extra_args)

        def apply(self, logits: Logits, states: Sequence[SamplingState]) -> None:
            raise ZeroDivisionError("no")

    engine = Engine(make_runner(), EngineConfig(logits_processors=(Failing(),)))
    wanted = SamplingParams(extra_args={"x": 1}, temperature=temperature)
    bad, good = make_request("bad", params=wanted), make_request("good")
    assert run(engine, [bad, good])[1] == alone(good)
    assert bad.finish_reason == "error"
    assert str(bad.error).endswith("failed: ZeroDivisionError('no')")


def test_functions_are_checked() -> None:
    with pytest.raises(InvalidSamplingError, match="logits_processors must be a list of functions"):
        SamplingParams(logits_processors=("x",))  # type: ignore[arg-type]
