"""Random choice from many rows of logits at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .splitmix import uniform
from .top_candidates import Candidates, Integers, Row, candidates_above, top_candidates

Floats = npt.NDArray[np.float64]

_WIDTHS = (64, 512)  # candidates that are sorted; from more of them, drawing without order is cheaper
_BLOCK = 128
_MOST_SURPRISE = 1000.0  # bits; two to minus this is still a float64
COLDEST = 1e-30  # the lowest temperature, which a float32 still divides by

_F = TypeVar("_F", np.float32, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """From which tokens one draw is made, in this order; see ``SamplingParams``.

    Args:
        temperature: divides the logits; at least ``COLDEST``.
        max_surprise: drop tokens of more bits of surprise than this (mirostat), keep at least the best.
        top_k: keep this many; 0 keeps all.
        top_p: keep the best until they have this probability.
        min_p: drop those less likely than this share of the best.
        typical_p: keep the most typical until they have this probability.
        xtc_threshold: of those at least this likely, keep only the least likely one; 1 is off.
    """

    temperature: float = 1.0
    max_surprise: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_threshold: float = 1.0


_Path = Callable[[Sequence[Row], Sequence[Filters], Floats], Integers]


def draw(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Draw one token a row.

    Each row's result depends on nothing but its own logits, filters and uniform.

    Args:
        rows: per row, logits [vocab_size], the largest finite.
        filters: per row.
        uniforms: [rows] in [0, 1).
    """
    tokens = np.empty(len(rows), np.int64)
    paths: dict[_Path, list[int]] = {}
    for i, each in enumerate(filters):
        paths.setdefault(_path(each, len(rows[i])), []).append(i)
    for path, chosen in paths.items():
        tokens[chosen] = path([rows[i] for i in chosen], [filters[i] for i in chosen], uniforms[chosen])
    return tokens


def _path(filters: Filters, vocab_size: int) -> _Path:
    if filters.max_surprise is not None:
        return _draw_unsurprising
    if filters.typical_p < 1.0:
        return _draw_typical
    if 0 < filters.top_k < vocab_size:
        return _draw_top_k
    if filters.top_p < 1.0:
        return _draw_nucleus
    return _draw_min_p if filters.min_p > 0.0 else _draw_any


def _draw_top_k(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    top_k = np.array([f.top_k for f in filters], np.int64)
    candidates = top_candidates(rows, top_k)
    weights = _weights(candidates.logits.astype(np.float64), filters)
    weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
    return _choose(candidates, weights, weights.sum(axis=1), filters, uniforms)


def _draw_nucleus(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Look at ever more candidates until they hold the wanted share of the whole row's mass."""
    total = _mass(rows, filters)
    wanted = total * np.array([f.top_p for f in filters])
    tokens = np.empty(len(rows), np.int64)
    left = np.arange(len(rows))
    for width in _WIDTHS:
        # The heaviest weighs 1, so that fewer tokens than the wanted mass cannot hold it.
        tried = left[wanted[left] <= width]
        if not len(tried):
            continue
        some = [filters[i] for i in tried.tolist()]
        candidates = top_candidates(
            [rows[i] for i in tried.tolist()], np.full(len(tried), min(width, len(rows[0])))
        )
        weights = _weights(candidates.logits.astype(np.float64), some)
        enough = (weights.sum(axis=1) >= wanted[tried]) | (width >= len(rows[0]))
        found = _choose(candidates, weights, total[tried], some, uniforms[tried])
        tokens[tried[enough]] = found[enough]
        left = np.setdiff1d(left, tried[enough])
    for i in left.tolist():
        tokens[i] = _draw_wide(rows[i], filters[i], float(uniforms[i]), float(wanted[i]))
    return tokens


def _draw_wide(row: Row, filters: Filters, first: float, nucleus: float) -> int:
    """Draw from all tokens until one is of the nucleus, which holds more of them than are worth sorting."""
    weights = _row_weights(row, filters)
    left = weights * (weights >= filters.min_p)
    if filters.xtc_threshold < 1.0:  # a nucleus of thousands of tokens has the mass asked for, and no more
        _exclude_top(left, filters.xtc_threshold * nucleus)
    cumulative = _Cumulative(left)
    key = int(first * 2**53)
    for place in itertools.count():
        token = cumulative.token(uniform(key, place) if place else first)
        weight = weights[token]
        before = float(np.multiply(weights, weights > weight).sum())
        before += weight * float(np.count_nonzero(weights[:token] == weight))
        if before < nucleus:
            return token
    raise AssertionError("the likeliest token is always of the nucleus")


def _draw_min_p(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Sort those that are kept, unless they are too many."""
    # One float32 step of slack, so that rounding drops nobody here; _choose decides exactly.
    spread = np.array([f.temperature * np.log(f.min_p) for f in filters])
    largest = np.array([row.max() for row in rows])
    threshold = np.nextafter((largest + spread).astype(np.float32), np.float32(-np.inf))
    counts = [np.count_nonzero(row >= least) for row, least in zip(rows, threshold, strict=True)]
    tokens = np.empty(len(rows), np.int64)
    is_few = np.less_equal(counts, _WIDTHS[-1])
    few, many = np.flatnonzero(is_few), np.flatnonzero(~is_few)
    if len(few):
        some = [filters[i] for i in few.tolist()]
        candidates = candidates_above([rows[i] for i in few.tolist()], threshold[few])
        weights = _weights(candidates.logits.astype(np.float64), some)
        tokens[few] = _choose(candidates, weights, weights.sum(axis=1), some, uniforms[few])
    if len(many):
        places = many.tolist()
        tokens[many] = _draw_any([rows[i] for i in places], [filters[i] for i in places], uniforms[many])
    return tokens


def _draw_unsurprising(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Mirostat 2 (arXiv:2007.14966), which has no other filters."""
    tokens = np.empty(len(rows), np.int64)
    for i, (row, f) in enumerate(zip(rows, filters, strict=True)):
        weights = _row_weights(row, f)
        bound = float(weights.sum()) * 2.0 ** -min(f.max_surprise or 0.0, _MOST_SURPRISE)
        weights *= weights >= min(bound, 1.0)  # the heaviest weighs 1, and stays
        tokens[i] = _Cumulative(weights).token(float(uniforms[i]))
    return tokens


def _draw_typical(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Row by row, over all candidates: whom typical-p keeps is known only once all are weighed."""
    tokens = np.empty(len(rows), np.int64)
    for i, (row, f) in enumerate(zip(rows, filters, strict=True)):
        count = min(f.top_k or len(row), len(row))
        candidates = top_candidates([row], np.array([count]))
        weights = _weights(candidates.logits.astype(np.float64), [f])
        weights[:, count:] = 0.0
        kept = weights[0] * _kept(weights, weights.sum(axis=1), [f])[0]
        kept[~_typical(kept / kept.sum(), f.typical_p)] = 0.0
        _exclude_top(kept, f.xtc_threshold * kept.sum())
        tokens[i] = candidates.token_ids[0, _inverse(kept, float(uniforms[i] * kept.sum()))]
    return tokens


def _typical(probabilities: Floats, mass: float) -> npt.NDArray[np.bool_]:
    """The tokens whose surprise is closest to the entropy, as many as reach ``mass`` (arXiv:2202.00666)."""
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = (probabilities * np.where(probabilities > 0, surprise, 0.0)).sum()
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    typical = np.zeros(len(order), np.bool_)
    typical[order] = before < mass
    return typical


def _draw_any(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Draw without sorting; of the filters, min-p and XTC apply."""
    tokens = np.empty(len(rows), np.int64)
    for i, (row, f) in enumerate(zip(rows, filters, strict=True)):
        weights = _row_weights(row, f)
        if f.min_p > 0.0:
            weights *= weights >= f.min_p
        if f.xtc_threshold < 1.0:
            _exclude_top(weights, f.xtc_threshold * float(weights.sum()))
        tokens[i] = _Cumulative(weights).token(float(uniforms[i]))
    return tokens


class _Cumulative:
    """Inverse of a cumulative distribution in two levels: find the block, then the token in it."""

    def __init__(self, weights: npt.NDArray[np.float32]) -> None:
        self._weights = weights
        self._sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).astype(np.float64)
        self._mass = np.cumsum(self._sums)

    def token(self, uniform: float) -> int:
        """The token at this share of the mass."""
        target = uniform * self._mass[-1]
        block = min(int((self._mass <= target).sum()), int(np.searchsorted(self._mass, self._mass[-1])))
        inside = self._weights[block * _BLOCK : (block + 1) * _BLOCK]
        return block * _BLOCK + _inverse(inside, target - (self._mass[block] - self._sums[block]))


def _inverse(weights: npt.NDArray[_F], target: float) -> int:
    """The first index at which the cumulative sum exceeds ``target``; never one without weight."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, target, side="right")), last)


def _mass(rows: Sequence[Row], filters: Sequence[Filters]) -> Floats:
    """Per row, the sum of all weights; summed row by row, so that it is the same in every batch."""
    return np.array([float(_row_weights(row, f).sum()) for row, f in zip(rows, filters, strict=True)])


def _row_weights(row: Row, filters: Filters) -> npt.NDArray[np.float32]:
    """``_weights`` of a single row; a row of this size is best worked on alone, within a core's cache."""
    weights: npt.NDArray[np.float32] = row - row.max()
    if filters.temperature != 1.0:
        with np.errstate(over="ignore"):
            weights /= np.float32(filters.temperature)
    np.exp(weights, out=weights)
    return weights


def _weights(logits: npt.NDArray[_F], filters: Sequence[Filters]) -> npt.NDArray[_F]:
    """exp(logits / temperature) in the logits' precision, scaled so that the largest of each row is 1."""
    temperature = np.array([f.temperature for f in filters], logits.dtype)
    weights: npt.NDArray[_F] = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights /= temperature[:, None]
    np.exp(weights, out=weights)
    return weights


def _kept(weights: Floats, total: Floats, filters: Sequence[Filters]) -> npt.NDArray[np.bool_]:
    """Which of the sorted candidates top-p and min-p leave."""
    top_p = np.array([f.top_p for f in filters])
    min_p = np.array([f.min_p for f in filters])
    before = np.cumsum(weights, axis=1) - weights
    kept = (weights > 0.0) & (weights >= min_p[:, None])
    kept &= (before < (top_p * total)[:, None]) | (top_p[:, None] >= 1.0)
    return kept


def _exclude_top(weights: npt.NDArray[_F], bound: float) -> None:
    """Of one row's weights that reach ``bound``, leave only the least; of equal ones the last.

    XTC, by its author's definition: https://github.com/oobabooga/text-generation-webui/pull/6335.
    """
    if bound > 1.0:  # no weight is above 1
        return
    top = np.flatnonzero(weights >= bound)
    if len(top) > 1:
        last = len(top) - 1 - int(np.argmin(weights[top][::-1]))
        weights[np.delete(top, last)] = 0.0


def _choose(
    candidates: Candidates, weights: Floats, total: Floats, filters: Sequence[Filters], uniforms: Floats
) -> Integers:
    """Apply top-p, min-p and XTC to the sorted candidates, and draw from what is left."""
    cumulative = np.cumsum(weights, axis=1)
    last = np.maximum(_kept(weights, total, filters).sum(axis=1), 1) - 1
    for i, f in enumerate(filters):
        if f.xtc_threshold < 1.0:
            _exclude_top(weights[i, : last[i] + 1], f.xtc_threshold * float(cumulative[i, last[i]]))
            cumulative[i] = np.cumsum(weights[i])
    rows = np.arange(len(weights))
    target = uniforms * cumulative[rows, last]
    chosen = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    return np.asarray(candidates.token_ids[rows, chosen], np.int64)
