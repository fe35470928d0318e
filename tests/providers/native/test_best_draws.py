"""The library draws the tokens that NumPy draws from the largest logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import BestLogits
from carryall.providers.native.best_draws import BestDraws
from carryall.runtime.engine.sampling.random_sampling import draw_best
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.types.sampling_params import SamplingParams

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.just(1.0), st.floats(0.02, 4.0)),
        "top_k": st.one_of(st.just(0), st.integers(1, 900)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
        "seed": st.integers(0, 2**63 - 1),
    }
)
ROWS = st.lists(
    st.tuples(
        OPTIONS,
        st.sampled_from([0.5, 2.0, 4.0, 6.0]),
        st.booleans(),  # ties
        st.sampled_from([1, 8, 64, 600]),
        st.booleans(),  # exact
        st.integers(0, 2**40),  # number of the token
    ),
    min_size=1,
    max_size=6,
)


def refuse() -> npt.NDArray[np.float32]:
    raise AssertionError("all logits were asked for")


def best_of(seed: int, size: int, spread: float, ties: bool, count: int, exact: bool) -> BestLogits:
    logits = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    logits = np.round(logits) if ties else logits
    order = np.argsort(-logits, kind="stable")[:count]
    total = float(np.log(np.exp(logits.astype(np.float64)).sum())) + (0.0 if exact else 0.01)
    return BestLogits(order, logits[order], total, size, refuse, exact)


@pytest.mark.long
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, size=st.sampled_from([50, 64, 700, 3000]), seed=st.integers(0, 2**31))
def test_equal_to_numpy(library: Path, rows: list[tuple[Any, ...]], size: int, seed: int) -> None:
    best, states = [], []
    for i, (options, *kind, number) in enumerate(rows):
        best.append(best_of(seed + i, size, *kind))
        states.append(SamplingState(SamplingParams(**options), np.empty(0, np.int64)))
        states[-1].num_tokens = number
    expected = draw_best(best, [s.filters() for s in states], [s.uniform() for s in states])
    options = [state.draw_options or b"" for state in states]
    drawn = BestDraws(library)(best, options, [state.num_tokens for state in states])
    assert drawn == expected


def test_shares_of_three_tokens(library: Path) -> None:
    """Of probabilities 1/2, 1/4 and 1/4; the others are not kept."""
    logits = np.log(np.array([0.5, 0.25, 0.25, 0.1])).astype(np.float32)
    row = BestLogits(np.array([7, 3, 5, 4]), logits, 1.0, 1000, refuse)
    state = SamplingState(SamplingParams(top_k=3, seed=3), np.empty(0, np.int64))
    count = 4000
    drawn = BestDraws(library)([row] * count, [state.draw_options or b""] * count, range(count))
    shares = [drawn.count(token) / count for token in (7, 3, 5)]
    assert set(drawn) == {7, 3, 5}
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.03)


def test_logits_of_another_type_are_refused(library: Path) -> None:
    row = BestLogits(np.arange(3), np.zeros(3, np.float16), 1.0, 1000, refuse)
    state = SamplingState(SamplingParams(top_k=3), np.empty(0, np.int64))
    with pytest.raises(ProviderRuntimeError, match="float16, not float32"):
        BestDraws(library)([row], [state.draw_options or b""], [0])


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"typical_p": 0.5}, {"xtc_probability": 0.5}], ids=str)
def test_filters_that_only_numpy_has(options: dict[str, Any]) -> None:
    assert SamplingState(SamplingParams(**options), np.empty(0, np.int64)).draw_options is None


@pytest.mark.long
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    size=st.one_of(st.integers(65, 3000), st.just(49_152)),
    count=st.sampled_from([1, 63, 64]),
    rows=st.integers(1, 3),
    kind=st.sampled_from(["random", "ties", "equal", "rising", "falling", "masked"]),
)
def test_largest_logits_are_those_of_a_sort(
    library: Path, seed: int, size: int, count: int, rows: int, kind: str
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32)
    if kind == "masked":
        logits[:, np.random.default_rng(seed).permutation(size)[64:]] = -np.inf
    elif kind in ("rising", "falling"):
        logits = np.sort(logits if kind == "rising" else -logits) * (1 if kind == "rising" else -1)
    elif kind != "random":
        logits = np.round(logits) if kind == "ties" else np.zeros_like(logits)
    summed = [row % 2 == 0 for row in range(rows)]
    best = BestDraws(library).largest(list(logits), count, summed)
    for row, own, exact in zip(logits, best, summed, strict=True):
        order = np.argsort(-row, kind="stable")[:count]
        np.testing.assert_array_equal(own.token_ids, order)
        np.testing.assert_array_equal(own.logits, row[order])
        total = float(np.logaddexp.reduce(row.astype(np.float64)))
        assert own.exact == exact
        assert own.logsumexp == pytest.approx(total, abs=1e-6) if exact else own.logsumexp >= total - 1e-9
        np.testing.assert_array_equal(own.whole(), row)


@pytest.mark.parametrize("place", [0, 64, 2000, 4999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_sum(library: Path, value: float, place: int) -> None:
    logits = np.zeros(5000, np.float32)
    logits[place] = value
    (best,) = BestDraws(library).largest([logits], 64, [False])
    assert np.isnan(best.logsumexp)


def test_fewer_logits_than_asked_for_give_no_sum(library: Path) -> None:
    logits = np.full(5000, -np.inf, np.float32)
    logits[:63] = 1.0
    (best,) = BestDraws(library).largest([logits], 64, [True])
    assert np.isnan(best.logsumexp)
