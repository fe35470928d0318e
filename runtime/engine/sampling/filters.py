"""Filters on sorted candidates (top-p, min-p, typical-p, XTC), and random sampling from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .full_vocabulary import exclude_top
from .top_candidates import Candidates, Integers

Floats = npt.NDArray[np.float64]

COLDEST = 1e-30  # the lowest temperature: its reciprocal is finite in float32

_F = TypeVar("_F", np.float32, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of one row, applied in this order; see ``SamplingParams``.

    Args:
        temperature: divides the logits; at least ``COLDEST``.
        max_surprise: drop tokens with more bits of surprise (mirostat); the most likely one is kept.
        top_k: keep this many; 0 keeps all.
        top_p: keep the most likely tokens until they have this probability.
        min_p: drop tokens less likely than this share of the most likely one.
        typical_p: keep the most typical tokens until they have this probability.
        xtc_threshold: of the tokens with at least this probability, keep only the least likely; 1 is off.
    """

    temperature: float = 1.0
    max_surprise: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_threshold: float = 1.0


@dataclass(frozen=True, slots=True)
class FilterColumns:
    """The filters of several rows as arrays [rows]."""

    temperature: Floats
    top_k: Integers
    top_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, filters: Sequence[Filters]) -> FilterColumns:
        """Return the columns of ``filters``, one for each row."""
        table = np.array([(f.temperature, f.top_k, f.top_p, f.min_p) for f in filters])
        return cls(table[:, 0], table[:, 1].astype(np.int64), table[:, 2], table[:, 3])


def weigh(logits: npt.NDArray[_F], temperature: Floats) -> npt.NDArray[_F]:
    """Return exp(logits / temperature [rows]) [rows, width] in the logits' dtype; the largest is 1."""
    weights: npt.NDArray[_F] = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature gives -inf for all but the largest, as intended
        weights /= temperature.astype(logits.dtype)[:, None]
    np.exp(weights, out=weights)
    return weights


def num_kept(weights: Floats, total: Floats, filters: FilterColumns) -> Integers:
    """Return how many of the sorted candidates top-p and min-p keep, per row; they are the first ones.

    Args:
        weights: [rows, width], in descending order.
        total: [rows], the total weight of each row, for top-p.
        filters: filters per row.
    """
    before = np.cumsum(weights, axis=1)
    before -= weights
    kept = (weights > 0.0) & (weights >= filters.min_p[:, None])
    bound = np.where(filters.top_p >= 1.0, np.inf, filters.top_p * total)
    kept &= before < bound[:, None]
    return np.asarray(kept.sum(axis=1), np.int64)


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


def choose(
    candidates: Candidates, weights: Floats, kept: Integers, filters: Sequence[Filters], uniforms: Floats
) -> Integers:
    """Apply XTC to the sorted candidates that top-p and min-p keep, and sample from the rest.

    Args:
        candidates: the candidates of each row.
        weights: [rows, width], their weights; XTC changes them in place.
        kept: [rows], how many of them are kept; the most likely one always is.
        filters: filters per row.
        uniforms: [rows] in [0, 1).

    Returns:
        [rows], the sampled token ids.
    """
    cumulative = np.cumsum(weights, axis=1)
    last = np.maximum(kept, 1) - 1
    for i, f in enumerate(filters):
        if f.xtc_threshold < 1.0:
            exclude_top(weights[i, : last[i] + 1], f.xtc_threshold * float(cumulative[i, last[i]]))
            cumulative[i] = np.cumsum(weights[i])
    rows = np.arange(len(weights))
    target = uniforms * cumulative[rows, last]
    chosen = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    return np.asarray(candidates.token_ids[rows, chosen], np.int64)
