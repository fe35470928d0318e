"""The filters of sampling, and the draw from sorted candidates.

Of all rows at once, as arrays [rows, width]: at 32 rows NumPy's calls cost more than their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ....records import dataclass
from .candidates import Integers

Floats = npt.NDArray[np.float64]

COLDEST = 1e-30  # the lowest temperature: its reciprocal is finite in float32
# Relative error of a float32 sum of exponentials over a vocabulary, on the CPU or on a device.
ROUNDING = 1e-4
_LEAST = math.ulp(0.0)

_F = TypeVar("_F", np.float32, np.float64)


class Filters(NamedTuple):
    """The filters of one row, applied in this order; see ``SamplingParams``.

    Args:
        temperature: divides the logits; at least ``COLDEST``.
        max_surprise: drop tokens with more bits of surprise (mirostat); the most likely one is kept, and no
            other filter applies. inf is off.
        top_k: keep this many; 0 keeps all.
        top_p: keep the most likely tokens until they have this probability.
        min_p: drop tokens less likely than this share of the most likely one.
        typical_p: keep the most typical tokens until they have this probability.
        xtc_threshold: of the tokens with at least this probability, keep only the least likely; 1 is off.
    """

    temperature: float = 1.0
    max_surprise: float = math.inf
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_threshold: float = 1.0


@dataclass(frozen=True, slots=True)
class FilterColumns:
    """The filters of several rows as arrays [rows]; those of a whole vocabulary alone are left out.

    Args:
        temperature: divides the logits.
        top_k: keep this many; inf keeps all.
        top_p: of the total weight; inf keeps all.
        min_p: of the heaviest weight; above 0, so that tokens without weight are dropped.
        rare: (row, typical_p, xtc_threshold) of the rows that have one of these.
    """

    temperature: Floats
    top_k: Floats
    top_p: Floats
    min_p: Floats
    rare: list[tuple[int, float, float]]

    @classmethod
    def of(cls, filters: Sequence[Filters]) -> FilterColumns:
        """Return the columns of ``filters``, one for each row."""
        rare = [
            (i, f.typical_p, f.xtc_threshold)
            for i, f in enumerate(filters)
            if f.typical_p < 1.0 or f.xtc_threshold < 1.0
        ]
        return cls(
            np.array([f.temperature for f in filters]),
            np.array([f.top_k or math.inf for f in filters]),
            np.array([f.top_p if f.top_p < 1.0 else math.inf for f in filters]),
            np.array([f.min_p or _LEAST for f in filters]),
            rare,
        )


class WeightedCandidates:
    """The weights of sorted candidates, exp(logit / temperature); the largest of a row is 1.

    Args:
        logits: float32 [rows, width], in descending order.
        filters: per row. Top-k is applied here: the weights of the candidates after the first k are 0.

    Attributes:
        weights: [rows, width].
        known: [rows], the sums of the weights.
    """

    def __init__(self, logits: npt.NDArray[np.float32], filters: FilterColumns) -> None:
        self._filters = filters
        self.weights = weigh(logits, filters.temperature)
        width = self.weights.shape[1]
        if filters.top_k.min() < width:
            self.weights[np.arange(width) >= filters.top_k[:, None]] = 0.0
        self._cumulative = self.weights.cumsum(axis=1)
        self.known = self._cumulative[:, -1]

    def num_kept(self, total: Floats) -> Integers:
        """Return how many of each row's first candidates top-p and min-p keep: [..., rows].

        Args:
            total: [..., rows], the total weight of all tokens that top-k keeps, for top-p.
        """
        kept = (self._cumulative - self.weights) < (self._filters.top_p * total)[..., None]
        kept &= self.weights >= self._filters.min_p[:, None]
        return np.asarray(kept.sum(axis=-1), np.int64)

    def draw(self, kept: Integers, uniforms: Floats) -> Integers:
        """Apply typical-p and XTC to the first ``kept`` [rows] candidates, and sample from the rest.

        Args:
            kept: the most likely candidate always is.
            uniforms: [rows] in [0, 1).

        Returns:
            [rows], the places of the sampled candidates.
        """
        last = np.maximum(kept, 1) - 1
        for i, typical_p, xtc_threshold in self._filters.rare:
            weights = self.weights[i, : last[i] + 1]
            if typical_p < 1.0:
                weights[~typical(weights / weights.sum(), typical_p)] = 0.0
            exclude_top(weights, float(xtc_threshold * weights.sum()))
            self._cumulative[i, : last[i] + 1] = np.cumsum(weights)
        place: Integers = np.minimum(
            self.places(uniforms * self._cumulative[np.arange(len(last)), last]), last
        )
        return place

    def places(self, targets: Floats) -> Integers:
        """Return the places at cumulated weights [..., rows]; the width is behind the last candidate."""
        # A cumulative sum never falls, so the number of those that do not exceed the target is a place.
        return np.asarray((self._cumulative <= targets[..., None]).sum(axis=-1), np.int64)


def weigh(logits: npt.NDArray[np.float32], temperature: Floats) -> Floats:
    """Return exp(logits / temperature [rows]) [rows, width], in proportion: the first, the largest, is 1."""
    weights = logits.astype(np.float64)
    weights -= weights[:, :1]
    weights /= temperature[:, None]
    return np.exp(weights, out=weights)


def typical(probabilities: Floats, mass: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens whose surprise is closest to the entropy, until they reach ``mass``.

    Locally typical sampling, arXiv:2202.00666.
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = (probabilities * np.where(probabilities > 0, surprise, 0.0)).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros(len(order), np.bool_)
    kept[order] = before < mass
    return kept


def exclude_top(weights: npt.NDArray[_F], bound: float, heaviest: float = 1.0) -> None:
    """Set all weights >= ``bound`` to 0 except the smallest of them (the last of equal ones), in place.

    XTC, by its author's definition: https://github.com/oobabooga/text-generation-webui/pull/6335.
    """
    if bound > heaviest:
        return
    top = np.flatnonzero(weights >= bound)
    if len(top) > 1:
        last = len(top) - 1 - int(np.argmin(weights[top][::-1]))
        weights[np.delete(top, last)] = 0.0
