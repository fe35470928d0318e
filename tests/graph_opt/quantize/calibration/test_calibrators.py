"""Histograms of fixed size, and the ranges that calibrators compute from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization.calibrate import HistogramCollector

from carryall.graph_opt.quantize.calibration.calibrators import (
    CALIBRATORS,
    LEVELS,
    Histogram,
    min_max,
    mse,
    percentile,
)

RNG = np.random.default_rng(0)
SAMPLES = {
    "normal": RNG.standard_normal(50_000),
    "laplace": RNG.laplace(size=50_000),
    "skewed": RNG.gamma(1.0, 2.0, 50_000),
}


def histogram(*parts: object) -> Histogram:
    result = Histogram()
    for part in parts:
        result.add(np.asarray(part, np.float32))
    return result


def squared_error(x: np.ndarray, limit: float) -> float:
    scale = limit / LEVELS
    return float(((np.clip(np.rint(x / scale), -LEVELS, LEVELS) * scale - x) ** 2).mean())


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=20), max_size=6))
def test_all_values_are_counted_at_a_fixed_size(parts: list[list[float]]) -> None:
    found = histogram(*parts)
    values = np.abs(np.array([value for part in parts for value in part], np.float32))
    assert found.counts.shape == Histogram().counts.shape
    assert found.counts.sum() == values.size
    assert found.largest == values.max(initial=0)
    # The number of values below a bin's upper edge equals the count up to it, except values on the edge.
    for share in (0.25, 0.5, 1.0):
        edge = int(share * len(found.counts))
        below, width = found.counts[:edge].sum(), found.top / len(found.counts)
        least, most = (values <= found.top * share - width).sum(), (values <= found.top * share + width).sum()
        assert least <= below <= most


@pytest.mark.parametrize("name", SAMPLES)
def test_pieces_give_the_same_ranges_as_the_whole(name: str) -> None:
    """The bin width depends on the first piece; entropy is too sensitive to it and not compared."""
    pieces = histogram(*np.array_split(np.sort(np.abs(SAMPLES[name])), 40))
    whole = histogram(SAMPLES[name])
    for calibrator in (min_max, percentile, mse):
        assert calibrator(pieces) == pytest.approx(calibrator(whole), rel=0.05)


@pytest.mark.parametrize("name", SAMPLES)
def test_ranges(name: str) -> None:
    x = SAMPLES[name]
    found = histogram(x)
    assert min_max(found) == pytest.approx(np.abs(x).max(), rel=1e-6)
    assert percentile(found) == pytest.approx(np.quantile(np.abs(x), 0.9999), rel=0.02)
    best = min(squared_error(x, limit) for limit in np.linspace(0.05, 1, 300) * np.abs(x).max())
    assert squared_error(x, mse(found)) < 1.02 * best


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLES)
def test_entropy_is_near_that_of_onnxruntime(name: str) -> None:
    oracle = HistogramCollector(
        method="entropy",
        symmetric=True,
        num_bins=2048,
        num_quantized_bins=255,
        percentile=99.99,
        scenario="same",
    )
    magnitudes = np.abs(RNG.choice(SAMPLES[name], 1_000_000) * RNG.uniform(0.9, 1.0, 1_000_000)).astype(
        np.float32
    )
    oracle.collect({"x": [np.concatenate([magnitudes, -magnitudes])]})
    expected = float(np.ravel(oracle.compute_collection_result()["x"][1])[0])
    assert CALIBRATORS["entropy"](histogram(magnitudes)) == pytest.approx(expected, rel=0.2)


def test_outliers_are_clipped_by_all_but_min_max() -> None:
    x = np.concatenate([SAMPLES["normal"], [100.0]])
    limits = {name: calibrator(histogram(x)) for name, calibrator in CALIBRATORS.items()}
    assert limits.pop("minmax") == 100
    assert max(limits.values()) < 90
    assert max(limits["percentile"], limits["entropy"]) < 10


@pytest.mark.parametrize("calibrator", CALIBRATORS.values())
def test_values_of_one_size(calibrator: object) -> None:
    assert callable(calibrator)
    assert calibrator(histogram(np.full(9, -3.0))) == pytest.approx(3, rel=1e-3)
    assert 0 < calibrator(histogram(np.zeros(9))) < 1e-5
    assert 0 < calibrator(Histogram()) < 1e-5


def test_histograms_can_be_stored() -> None:
    found = histogram(SAMPLES["normal"])
    again = Histogram.from_array(found.to_array())
    assert (again.top, again.largest) == (found.top, found.largest)
    np.testing.assert_array_equal(again.counts, found.counts)
