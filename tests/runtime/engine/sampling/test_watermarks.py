"""Watermarks write the same green lists and values as transformers, whose results are recorded here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.sampler import sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.engine.sampling.watermarks import (
    SynthId,
    context_hash,
    draws,
    green_tokens,
    kept_tokens,
    ngram_values,
)
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.watermark import Watermark

# Of transformers 5.24 and torch on a CPU; ``record`` in the file says how.
GOLDEN: Any = json.loads((Path(__file__).parent / "watermarks.json").read_text())


@pytest.mark.parametrize(("vocab_size", "ratio", "before", "digest"), GOLDEN["green"])
def test_green_lists_are_those_of_transformers(
    vocab_size: int, ratio: float, before: int, digest: str
) -> None:
    green = np.flatnonzero(green_tokens(Watermark(ratio=ratio), vocab_size, before)).tolist()
    assert hashlib.sha256(json.dumps(green).encode()).hexdigest() == digest


@given(st.integers(2, 400), st.floats(0.01, 0.99), st.integers(0, 10**6), st.integers(1, 2**62))
@settings(max_examples=100)
def test_a_green_list_is_the_begin_of_the_shuffle(size: int, ratio: float, before: int, key: int) -> None:
    """Against the plain algorithm of ``torch.randperm``: Fisher and Yates' shuffle."""
    seed = key * before % (2**64 - 1)
    order = list(range(size))
    for i, draw in enumerate(draws(seed, size - 1).tolist()):
        other = i + draw % (size - i)
        order[i], order[other] = order[other], order[i]
    count = int(size * ratio)
    found = np.flatnonzero(green_tokens(Watermark(ratio=ratio, key=key), size, before)).tolist()
    assert found == sorted(order[:count])


def of_synthid(case: Any) -> Watermark:
    names = {
        "keys": "keys",
        "n": "ngram_length",
        "size": "table_size",
        "seed": "table_seed",
        "hist": "context_history",
    }
    return Watermark(kind="synthid", **{ours: case[theirs] for theirs, ours in names.items()})


@pytest.mark.parametrize("case", GOLDEN["synthid"])
def test_tournaments_are_those_of_transformers(case: Any) -> None:
    state = SynthId(of_synthid(case), Filters())
    for place, (scores, expected) in enumerate(zip(case["scores"], case["rows"], strict=True)):
        if place:
            state.observe(case["seq"][place])
        logits = np.array(scores, np.float32)
        state.apply(logits)
        again = np.array(scores, np.float32)
        state.apply(again)  # a step that is repeated
        np.testing.assert_array_equal(again, logits)
        shares = np.exp(np.array(expected) - np.max(expected))
        np.testing.assert_allclose(np.exp(logits), shares / shares.sum(), rtol=1e-5, atol=1e-7)  # of float32


@pytest.mark.parametrize("case", GOLDEN["synthid"])
def test_values_of_a_text_are_those_of_transformers(case: Any) -> None:
    width, tokens, watermark = case["n"] - 1, case["seq"], of_synthid(case)
    for place, expected in enumerate(case["g"]):
        context, token = context_hash(tokens[place : place + width]), np.array([tokens[place + width]])
        assert ngram_values(watermark, context, token)[:, 0].tolist() == expected


@given(
    st.integers(1, 60), st.integers(0, 70), st.floats(0.05, 1.0), st.floats(0, 0.5), st.integers(0, 2**32 - 1)
)
@settings(max_examples=100)
def test_the_tournament_is_held_among_the_tokens_that_the_filters_keep(
    size: int, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 3
    found = kept_tokens(logits, Filters(0.7, top_k=top_k, top_p=top_p, min_p=min_p)).tolist()
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64) / 0.7)
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    kept = (before < top_p * weights.sum()) & (weights >= min_p * weights[0])
    near = (
        np.abs(before - top_p * weights.sum()).min() < 1e-9
        or np.abs(weights - min_p * weights[0]).min() < 1e-9
    )
    kept[0] = True
    assert near or found == order[kept].tolist()


@pytest.mark.long
def test_a_tournament_keeps_the_shares_on_average() -> None:
    """Over random contexts, the distribution after the tournament is that before it."""
    logits = np.array([1.0, 0.5, 0.0, -1.0], np.float32)
    shares = np.exp(logits) / np.exp(logits).sum()
    watermark = Watermark(kind="synthid", keys=(11, 22, 33))
    source, total = np.random.default_rng(0), np.zeros(4)
    for _ in range(4000):
        state = SynthId(watermark, Filters())
        for token in source.integers(0, 10**6, 4).tolist():
            state.observe(token)
        row = logits.copy()
        state.apply(row)
        total += np.exp(row)
    np.testing.assert_allclose(total / 4000, shares, atol=0.02)


def drawn(params: SamplingParams, rows: npt.NDArray[np.float32]) -> list[int]:
    """The tokens that a state draws from rows of logits."""
    state, tokens = SamplingState(params, np.array([1, 2])), []
    for row in rows:
        token = sample([row], [state])[0].token_id
        tokens.append(token)
        state.observe(token)
    return tokens


@pytest.mark.parametrize("watermark", [True, {"kind": "synthid", "keys": [3, 5, 7]}])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_batch_draws_what_each_row_draws_alone(watermark: Any, options: dict[str, Any]) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 20, 50)).astype(np.float32)
    params = [SamplingParams(seed=seed, watermark=watermark, **options) for seed in range(6)]
    alone = [drawn(each, each_rows) for each, each_rows in zip(params, rows, strict=True)]
    states = [SamplingState(each, np.array([1, 2])) for each in params]
    together: list[list[int]] = [[] for _ in params]
    for step in range(20):
        for i, sampled in enumerate(sample(list(rows[:, step]), states)):
            states[i].observe(sampled.token_id)
            together[i].append(sampled.token_id)
    assert together == alone


class Forbids:
    """A grammar that allows the tokens below 5."""

    lowers = True

    def observe(self, token: int) -> None: ...

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        logits[5:] = -np.inf


@pytest.mark.parametrize("watermark", [True, {"kind": "synthid", "keys": [3, 5, 7]}])
def test_a_grammar_holds_with_a_watermark(watermark: Any) -> None:
    state = SamplingState(SamplingParams(seed=1, watermark=watermark, top_k=3), np.array([1]))
    state.restrict(Forbids())
    for row in np.random.default_rng(0).standard_normal((30, 50)).astype(np.float32):
        token = sample([row], [state])[0].token_id
        assert token < 5
        state.observe(token)
