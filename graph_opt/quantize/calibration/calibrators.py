"""Calibrators: how large a value 8 bits should hold, from a histogram of the magnitudes that were seen.

A larger range rounds everything more coarsely, a smaller one clips outliers. Min-max clips nothing, and
percentile a fixed share of the values; entropy loses least information, as a KL divergence (S. Migacz, "8-bit
Inference with TensorRT", GTC 2017); mse has the least squared error. H. Wu et al., "Integer Quantization for
Deep Learning Inference", https://arxiv.org/abs/2004.09602, compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph.lazy import Array

LEVELS = 127  # of the magnitudes of an int8 whose zero point is 0
_BINS = 8192  # enough for 128 levels below an outlier of 64 times their range
_SMALLEST = 1e-6  # of a range, so that a value of zeros has a scale
_PERCENTILE = 99.99  # as in TensorRT's toolkit
_CANDIDATES = 128
_UNSEEN = 1e-9  # probability of what clipping makes impossible
_ENTROPY_BINS = 2048  # as in TensorRT: where bins are too fine, most hold nothing and levels are not compared

Counts = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


class Histogram:
    """Magnitudes counted in bins of equal width, whose number stays the same however many values come.

    When a value lies beyond the last bin, the bins double their width and neighbours are joined.

    Attributes:
        counts: values in each bin.
        top: the upper end of the last bin.
        largest: the largest magnitude seen.
    """

    def __init__(self) -> None:
        self.counts: Counts = np.zeros(_BINS, np.int64)
        self.top = _SMALLEST
        self.largest = 0.0

    def add(self, values: Array) -> None:
        """Count the magnitudes of ``values``, which must be finite."""
        magnitudes = np.abs(values).reshape(-1)
        if not magnitudes.size:
            return
        self.largest = max(self.largest, float(magnitudes.max()))
        if not self.counts.any():
            self.top = max(self.largest, _SMALLEST)
        while self.top < self.largest:
            joined = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([joined, np.zeros_like(joined)])
            self.top *= 2
        bins = (magnitudes * np.float32(_BINS / self.top)).astype(np.int32)
        self.counts += np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)

    def to_array(self) -> Reals:
        """Return all that is known, to be stored; ``from_array`` reads it."""
        return np.array([self.top, self.largest, *self.counts], np.float64)

    @classmethod
    def from_array(cls, array: Reals) -> Histogram:
        """Return what ``to_array`` was called on."""
        result = cls()
        result.top, result.largest = float(array[0]), float(array[1])
        result.counts = array[2:].astype(np.int64)
        return result

    @property
    def centers(self) -> Reals:
        """The middle of each bin."""
        return np.arange(0.5, _BINS) * (self.top / _BINS)


Steps = Callable[[float], float]  # limit of the magnitudes -> width of a level


def symmetric(limit: float) -> float:
    """Width of a level where positive and negative values have as many: int8 with zero point 0."""
    return limit / LEVELS


class Calibrator(Protocol):
    """Returns the magnitude beyond which values are clipped."""

    def __call__(self, histogram: Histogram, steps: Steps = symmetric) -> float:
        """``steps`` says how wide a level is for a limit."""


def min_max(histogram: Histogram, steps: Steps = symmetric) -> float:
    """The largest magnitude seen."""
    return max(histogram.largest, _SMALLEST)


def percentile(histogram: Histogram, steps: Steps = symmetric) -> float:
    """The magnitude that 99.99 % of the values do not exceed."""
    below = np.cumsum(histogram.counts)
    index = int(np.searchsorted(below, below[-1] * (_PERCENTILE / 100)))
    return _within(histogram, (index + 1) * histogram.top / _BINS)


def entropy(histogram: Histogram, steps: Steps = symmetric) -> float:
    """The range whose levels, clipped values in the last one, diverge least from the histogram.

    Two things differ from the published procedure, which clips far too much of values that are mostly near
    zero, as in MLPs: they count as if they were as frequent as their neighbours, since zero stays exact (so
    does NVIDIA's pytorch-quantization), and clipped values are missed where they were, not only in the sum.
    """
    counts = histogram.counts.reshape(_ENTROPY_BINS, -1).sum(axis=1)
    edges = _edges(counts, at_least=LEVELS + 1)
    counts[0] = min(counts[:2])
    width = histogram.top / _ENTROPY_BINS
    divergences = {
        edge: _divergence(counts.astype(np.float64), edge, round(edge * width / steps(edge * width)))
        for edge in edges
    }
    best = min(divergences, key=divergences.__getitem__)
    return _within(histogram, best * width)


def mse(histogram: Histogram, steps: Steps = symmetric) -> float:
    """The range of least squared error, clipping included."""
    centers, errors = histogram.centers, {}
    for edge in _edges(histogram.counts, at_least=1):
        limit = edge * histogram.top / _BINS
        scale = steps(limit)
        rounded = np.minimum(np.rint(centers / scale), round(limit / scale)) * scale
        errors[edge] = float(histogram.counts @ (centers - rounded) ** 2)
    return _within(histogram, min(errors, key=errors.__getitem__) * histogram.top / _BINS)


CALIBRATORS: Mapping[str, Calibrator] = {
    "minmax": min_max,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mse,
}
CALIBRATOR = "mse"  # where nobody chooses


def _within(histogram: Histogram, limit: float) -> float:
    return max(min(limit, histogram.largest), _SMALLEST)


def _edges(counts: Counts, at_least: int) -> list[int]:
    """Return numbers of bins to keep, each a little more than the one before, up to the last bin in use."""
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    first = min(at_least, last)
    return sorted({*np.geomspace(first, last, _CANDIDATES).astype(int).tolist(), last})


def _divergence(counts: Reals, edge: int, count: int) -> float:
    """Return KL(values | what so many levels leave of them), spread over bins, clipped ones in the last."""
    levels = np.rint((np.arange(edge) + 0.5) * (count / edge)).astype(np.int64)
    kept = counts[:edge]
    used = kept > 0
    shares = np.bincount(levels, used)
    left = np.zeros_like(counts)
    left[:edge] = np.where(used, (np.bincount(levels, kept) / np.maximum(shares, 1))[levels], 0)
    left[edge - 1] += counts[edge:].sum()
    known, total = counts > 0, max(counts.sum(), 1)
    p, q = counts[known] / total, np.maximum(left[known] / total, _UNSEEN)
    return float((p * np.log(p / q)).sum())
