"""Calibrators: choose the range of an 8-bit value from a histogram of observed magnitudes.

A larger range increases the rounding error, a smaller one clips outliers. ``minmax`` clips nothing;
``percentile`` clips a fixed share of the values; ``entropy`` minimises the KL divergence (S. Migacz, "8-bit
Inference with TensorRT", GTC 2017); ``mse`` minimises the squared error. Comparison: H. Wu et al., "Integer
Quantization for Deep Learning Inference", https://arxiv.org/abs/2004.09602.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...graph.lazy import Array

LEVELS = 127  # positive levels of a symmetric int8
_BINS = 8192  # enough for 128 levels within 1/64 of the range of an outlier
_SMALLEST = 1e-6  # smallest range, so that a value of zeros has a scale
_PERCENTILE = 99.99  # as in TensorRT's toolkit
_CANDIDATES = 128
_UNSEEN = 1e-9  # probability of values that are clipped
_ENTROPY_BINS = 2048  # as in TensorRT; with finer bins most are empty, and levels cannot be compared

Counts = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


class Histogram:
    """A histogram of magnitudes with a fixed number of bins of equal width.

    If a value exceeds the last bin, the bins double their width by merging neighbours.

    Attributes:
        counts: number of values per bin.
        top: upper end of the last bin.
        largest: largest magnitude.
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
        """Return the state as an array; ``from_array`` restores it."""
        return np.array([self.top, self.largest, *self.counts], np.float64)

    @classmethod
    def from_array(cls, array: Reals) -> Histogram:
        """Return the histogram stored by ``to_array``."""
        result = cls()
        result.top, result.largest = float(array[0]), float(array[1])
        result.counts = array[2:].astype(np.int64)
        return result

    @property
    def centers(self) -> Reals:
        """The middle of each bin."""
        return np.arange(0.5, _BINS) * (self.top / _BINS)


Steps = Callable[[float], float]  # range -> quantization step


def symmetric(limit: float) -> float:
    """Return the quantization step of symmetric int8 for a range of [-limit, limit]."""
    return limit / LEVELS


class Calibrator(Protocol):
    """A function that returns the magnitude above which values are clipped."""

    def __call__(self, histogram: Histogram, steps: Steps = symmetric) -> float:
        """Return the limit; ``steps`` returns the quantization step of a limit."""


def min_max(histogram: Histogram, steps: Steps = symmetric) -> float:
    """Return the largest magnitude."""
    return max(histogram.largest, _SMALLEST)


def percentile(histogram: Histogram, steps: Steps = symmetric) -> float:
    """Return the magnitude that 99.99 % of the values do not exceed."""
    below = np.cumsum(histogram.counts)
    index = int(np.searchsorted(below, below[-1] * (_PERCENTILE / 100)))
    return _within(histogram, (index + 1) * histogram.top / _BINS)


def entropy(histogram: Histogram, steps: Steps = symmetric) -> float:
    """Return the range with the smallest KL divergence between the histogram and its quantized version.

    Two details differ from the published procedure, which clips too much if most values are near zero, as in
    MLPs. The first bin counts as at most its neighbour, because zero is represented exactly (NVIDIA's
    pytorch-quantization does the same). And clipped bins have probability 1e-9 in the quantized version.
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
    """Return the range with the least squared error, including clipping."""
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
CALIBRATOR = "mse"  # the default


def _within(histogram: Histogram, limit: float) -> float:
    return max(min(limit, histogram.largest), _SMALLEST)


def _edges(counts: Counts, at_least: int) -> list[int]:
    """Return candidate numbers of bins, geometrically spaced up to the last bin in use."""
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    first = min(at_least, last)
    return sorted({*np.geomspace(first, last, _CANDIDATES).astype(int).tolist(), last})


def _divergence(counts: Reals, edge: int, count: int) -> float:
    """Return KL(values | quantized) for ``count`` levels over ``edge`` bins, clipped values in the last."""
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
