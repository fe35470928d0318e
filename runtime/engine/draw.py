"""Random choice from many rows of logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .top_candidates import Candidates, Integers, Row, candidates_above, grouped, top_candidates

Floats = npt.NDArray[np.float64]

_NUCLEUS_WIDTHS = (64, 512, 4096)  # candidates looked at before the whole vocabulary is sorted
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
    for width in (*_NUCLEUS_WIDTHS, len(rows[0])):
        count = np.full(len(left), min(width, len(rows[0])), np.int64)
        candidates = top_candidates([rows[i] for i in left.tolist()], count)
        some = [filters[i] for i in left.tolist()]
        weights = _weights(candidates.logits.astype(np.float64), some)
        enough = (weights.sum(axis=1) >= wanted[left]) | (count == len(rows[0]))
        found = _choose(candidates, weights, total[left], some, uniforms[left])
        tokens[left[enough]] = found[enough]
        left = left[~enough]
        if not len(left):
            break
    return tokens


def _draw_min_p(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    candidates = _heavier(rows, np.array([f.min_p for f in filters]), filters)
    weights = _weights(candidates.logits.astype(np.float64), filters)
    return _choose(candidates, weights, weights.sum(axis=1), filters, uniforms)


def _heavier(rows: Sequence[Row], weight: Floats, filters: Sequence[Filters]) -> Candidates:
    """At least the tokens whose weight reaches the row's, where the best one's is 1."""
    # One float32 step of slack, so that rounding drops nobody here; the caller decides exactly.
    spread = np.array([f.temperature for f in filters]) * np.log(weight)
    largest = np.array([row.max() for row in rows])
    threshold = np.nextafter((largest + spread).astype(np.float32), np.float32(-np.inf))
    return candidates_above(rows, threshold)


def _draw_unsurprising(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Integers:
    """Mirostat 2 (arXiv:2007.14966), which has no other filters."""
    total = _mass(rows, filters)
    bound = total * np.exp2([-min(f.max_surprise or 0.0, _MOST_SURPRISE) for f in filters])
    candidates = _heavier(rows, np.minimum(bound, 1.0), filters)
    weights = _weights(candidates.logits.astype(np.float64), filters)
    weights[(weights < bound[:, None]) & (np.arange(weights.shape[1]) > 0)] = 0.0
    return _choose(candidates, weights, total, [Filters()] * len(rows), uniforms)


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
    """Inverse of the cumulative distribution in two levels: find the block, then the token in it."""
    tokens = np.empty(len(rows), np.int64)
    for chosen, logits in grouped(rows):
        weights = _weights(logits, filters[chosen])
        for row, f in zip(weights, filters[chosen], strict=True):
            if f.xtc_threshold < 1.0:
                _exclude_top(row, f.xtc_threshold * row.sum(dtype=np.float64))
        starts = np.arange(0, logits.shape[1], _BLOCK)
        sums = np.add.reduceat(weights, starts, axis=1).astype(np.float64)
        mass = np.cumsum(sums, axis=1)
        target = uniforms[chosen] * mass[:, -1]
        block = np.minimum((mass <= target[:, None]).sum(axis=1), len(starts) - 1)
        for i, at in enumerate(block.tolist()):
            inside = weights[i, at * _BLOCK : (at + 1) * _BLOCK]
            before = mass[i, at] - sums[i, at]
            tokens[chosen.start + i] = at * _BLOCK + _inverse(inside, target[i] - before)
    return tokens


def _inverse(weights: npt.NDArray[_F], target: float) -> int:
    """The first index at which the cumulative sum exceeds ``target``; never one without weight."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, target, side="right")), last)


def _mass(rows: Sequence[Row], filters: Sequence[Filters]) -> Floats:
    """Per row, the sum of all weights."""
    mass = np.empty(len(rows), np.float64)
    for chosen, logits in grouped(rows):
        # Row by row: the order of a sum over several rows could depend on how many there are.
        mass[chosen] = [weights.sum(dtype=np.float64) for weights in _weights(logits, filters[chosen])]
    return mass


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
