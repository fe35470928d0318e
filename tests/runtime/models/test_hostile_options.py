"""Any options, prompts and texts of a request are rejected or run; the engine never stops."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_kit import toy_model

from carryall.errors import CarryallWarning, RequestError
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.sampling_params import SamplingParams

HUGE, INF = 2**70, math.inf
NUMBERS = [
    0,
    1,
    2,
    5,
    -1,
    0.5,
    1.0,
    1e-3,
    0.99,
    100.0,
    1e6,
    INF,
    -INF,
    math.nan,
    1e300,
    5e-324,
    2**31 - 1,
    HUGE,
]
TOKENS = st.sampled_from([0, 5, 257, 258, -1, HUGE])
NUMERIC = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if str(field.type) in ("int", "float", "int | None") and field.name not in ("n", "best_of", "max_tokens")
]
TEXTS = st.sampled_from(["", "a", "abab" * 20, "\ud800", "é\0中"])


def spoilt(tokens: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A logits processor that sets one logit to NaN."""
    logits[7] = np.nan
    return logits


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(NUMBERS) for name in NUMERIC},
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from(NUMBERS), max_size=3),
        "allowed_token_ids": st.lists(TOKENS, max_size=3),
        "stop_token_ids": st.lists(TOKENS, max_size=2),
        "logprob_token_ids": st.lists(TOKENS, max_size=2),
        "bad_words": st.lists(TEXTS | st.lists(TOKENS, max_size=3), max_size=2),
        "stop": st.lists(TEXTS, max_size=2),
        "dry_sequence_breakers": st.lists(TEXTS, max_size=2),
        "logits_processors": st.sampled_from([(), (spoilt,)]),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 3),
        "best_of": st.none() | st.integers(1, 4),
    },
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(toy_model(tmp_path_factory.mktemp("toy"))) as made:
        yield made


@settings(max_examples=60, deadline=None)
@given(options=OPTIONS, few=st.sets(st.sampled_from(NUMERIC), max_size=4), prompt=TEXTS | st.lists(TOKENS))
def test_a_request_is_refused_or_runs(llm: LLM, options: dict[str, Any], few: set[str], prompt: Any) -> None:
    options = {name: value for name, value in options.items() if name not in NUMERIC or name in few}
    try:
        with warnings.catch_warnings():
            # A request that fails while it runs, such as by its logits processor, warns.
            warnings.simplefilter("ignore", CarryallWarning)
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, **options))
    except RequestError:
        pass
    else:
        assert all(one.finish_reason in ("stop", "length", "error") for one in output.outputs)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [
        ([HUGE], {}, "prompt token id 1180591620717411303424 is outside"),
        ([-1], {}, "prompt token id -1 is outside"),
        ("\ud800", {}, "a lone surrogate"),
        ("a", {"bad_words": ["\ud800"]}, "a lone surrogate"),
        ("a", {"logit_bias": {5: 1e39}}, "logit_bias must be within"),
        ("a", {"allowed_token_ids": [HUGE]}, "allowed_token_ids must be an integer"),
        (
            "a",
            {"dry_multiplier": 1.0, "dry_allowed_length": HUGE},
            "dry_allowed_length must be an integer of at least 1 and at most 2147483647",
        ),
        ("a", {"repetition_penalty": 1e-300}, "repetition_penalty must be a number of at least 1e-06"),
    ],
)
def test_refusals_say_why(llm: LLM, prompt: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.generate([prompt], SamplingParams(max_tokens=4, **options))


def test_the_smallest_penalty_is_one(llm: LLM) -> None:
    (output,) = llm.generate("aaaa", SamplingParams(max_tokens=4, dry_multiplier=5e-324, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
