"""Every way to draw from a row of logits gives what the plain reference gives.

The ways: top-k; a nucleus among few candidates, or from the whole row; min-p
with few left, or many; whole rows; Mirostat; typical-p of sorted candidates, or from the whole row; each with
XTC. Greedy rows are tested in test_sampler.py, the best logits of a device in test_best_logits.py.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fuzzing import fuzz
from hypothesis import assume
from hypothesis import strategies as st
from plain_sampler import ROUNDING, keep, whole_rows_used

from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.random_sampling import sample_random

Logits = npt.NDArray[np.float32]


def random_logits(seed: int, spread: float, vocab_size: int, *, ties: bool = False) -> Logits:
    logits = np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)
    return np.round(logits, 1 if spread < 1 else 0) if ties else logits


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([1e-9, 0.1, 0.7, 1.0, 2.0, 100.0]),
    max_surprise=st.sampled_from([math.inf, math.inf, math.inf, math.inf, -1.0, 2.0, 7.0, 2000.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 20, 200, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.01]),
    xtc_threshold=st.sampled_from([1.0, 1.0, 0.5, 0.1, 0.01, 0.001]),
)


DRAWS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "spread": st.sampled_from([0.5, 3.0]),
        "ties": st.booleans(),
        "vocab_size": st.sampled_from([1, 7, 64, 129, 500, 1500]),
        "filters": FILTERS,
    }
)


@pytest.mark.parametrize("examples", [300, pytest.param(None, marks=pytest.mark.slow)])
def test_every_token_is_the_references_or_one_that_it_keeps(
    examples: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    ways: Counter[str] = Counter()
    fuzz(DRAWS, lambda draw: ways.update([check(**draw)]), examples)
    with capsys.disabled() if examples is None else nullcontext():
        print(f"{ways.total()} rows: {dict(ways)}")
    assert ways.keys() == {"candidates", "whole row"}


def check(seed: int, spread: float, ties: bool, vocab_size: int, filters: Filters) -> str:
    """Draw eight times from a row; return from what it was drawn."""
    logits = random_logits(seed, spread, vocab_size, ties=ties)
    kept = keep(logits, filters)
    assume(kept.margin > ROUNDING)
    uniforms = np.random.default_rng(seed).random(8)
    with whole_rows_used() as used:
        drawn = sample_random([logits] * len(uniforms), [filters] * len(uniforms), uniforms)
    for token, uniform in zip(drawn.token_ids.tolist(), uniforms.tolist(), strict=True):
        expected, margin = kept.draw(uniform)
        assert token in kept.tokens
        assert token == expected or used or margin <= ROUNDING
    return "whole row" if used else "candidates"


@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_a_token_is_left_where_every_token_of_a_wide_nucleus_is_a_top_choice(min_p: float) -> None:
    """XTC leaves the last token of the nucleus; that of the whole row was drawn and refused for ever."""
    logits = random_logits(0, 0.5, 1500)
    filters = Filters(temperature=100.0, top_p=0.5, min_p=min_p, xtc_threshold=0.0005)
    (expected,) = keep(logits, filters).tokens
    with whole_rows_used() as used:
        drawn = sample_random([logits] * 3, [filters] * 3, np.arange(3) / 3)
    assert used
    assert drawn.token_ids.tolist() == [expected] * 3


FEW, MANY = 3.0, 0.6  # spreads of logits of which filters leave few or thousands
SORTED: list[dict[str, Any]] = [
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.4},
    {"min_p": 0.05},
    {"typical_p": 0.5, "top_p": 0.9},
]


@pytest.mark.parametrize("xtc_threshold", [1.0, 0.05])
@pytest.mark.parametrize("options", SORTED, ids=str)
def test_few_candidates_are_drawn_from_in_order(options: dict[str, Any], xtc_threshold: float) -> None:
    logits = random_logits(0, FEW, 4000, ties=True)
    filters = Filters(**options, xtc_threshold=xtc_threshold)
    uniforms = np.arange(40) / 40
    with whole_rows_used() as used:
        tokens = sample_random([logits] * 40, [filters] * 40, uniforms).token_ids
    kept = keep(logits, filters)
    assert not used
    assert len(kept.tokens) > 1
    for token, uniform in zip(tokens.tolist(), uniforms.tolist(), strict=True):
        expected, margin = kept.draw(uniform)
        assert token == expected or margin <= ROUNDING


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [1, 40, 64, 65, 500, 20_000])
def test_without_a_filter_the_most_likely_tokens_come_first(vocab_size: int, temperature: float) -> None:
    filters, logits = Filters(temperature), random_logits(3, 3.0, vocab_size, ties=True)
    kept, uniforms = keep(logits, filters), np.arange(500) / 500
    tokens = sample_random([logits] * 500, [filters] * 500, uniforms).token_ids
    for token, uniform in zip(tokens.tolist(), uniforms.tolist(), strict=True):
        expected, margin = kept.draw(uniform)
        first = expected in kept.tokens[:64]
        assert token == expected or margin <= ROUNDING or not first
        assert (token in kept.tokens[:64]) == first or margin <= ROUNDING


WHOLE: list[tuple[float, int, dict[str, Any]]] = [
    (FEW, 4000, {}),
    (FEW, 4000, {"xtc_threshold": 0.004}),
    (MANY, 4000, {"min_p": 0.15}),
    (MANY, 4000, {"min_p": 0.15, "xtc_threshold": 0.0008}),
    (MANY, 4000, {"top_p": 0.7}),
    (MANY, 4000, {"top_p": 0.7, "temperature": 0.8}),
    (MANY, 4000, {"top_p": 0.8, "min_p": 0.15}),
    (MANY, 4000, {"top_p": 0.8, "xtc_threshold": 0.0008}),
    (MANY, 4000, {"top_p": 0.8, "min_p": 0.15, "xtc_threshold": 0.0008}),
    (MANY, 4000, {"top_p": 0.8, "min_p": 0.15, "xtc_threshold": 0.0006}),
    (MANY, 1000, {"typical_p": 0.7}),
    (FEW, 4000, {"max_surprise": 8.0}),
    (MANY, 4000, {"max_surprise": 12.0}),
]


@pytest.mark.long
@pytest.mark.parametrize(("spread", "count", "options"), WHOLE, ids=str)
def test_from_whole_rows_each_token_comes_as_often_as_it_should(
    spread: float, count: int, options: dict[str, Any]
) -> None:
    logits = random_logits(0, spread, 4000, ties=True)
    filters = Filters(**options)
    with whole_rows_used() as used:
        tokens = sample_random([logits] * count, [filters] * count, np.arange(count) / count).token_ids
    # Without a filter only the rest of the tokens is drawn from the whole row.
    assert used == [filters] * (count if options else len(used)) != []
    expected = keep(logits, filters).shares(len(logits))
    counts = np.bincount(tokens, minlength=len(logits))
    assert not counts[expected == 0].any()
    groups = np.arange(len(logits)) % 20
    shares = np.bincount(groups, counts / count)
    assert shares == pytest.approx(np.bincount(groups, expected), abs=5 * (0.1 / count) ** 0.5)
