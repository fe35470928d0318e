"""Random choice from many rows of logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from . import whole_rows
from .top_candidates import Candidates, Integers, Row, candidates_above, top_candidates
from .whole_rows import Cumulative, exclude_top, inverse, row_weights

Floats = npt.NDArray[np.float64]

_MOST_SORTED = 512  # candidates; from more of them, drawing without order is cheaper
NUCLEUS = 64  # candidates that usually hold what top-p keeps
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Per row, the token drawn, and where ``max_surprise`` was given its bits of surprise, else NaN."""

    token_ids: Integers
    surprises: Floats


@dataclass(frozen=True, slots=True)
class _Draws:
    """Rows to draw from; of each its largest logit, its filters and its uniform."""

    rows: Sequence[Row]
    largest: npt.NDArray[np.float32]
    filters: Sequence[Filters]
    uniforms: Floats

    def those(self, places: Sequence[int]) -> _Draws:
        """Some of them."""
        rows, filters = [self.rows[i] for i in places], [self.filters[i] for i in places]
        return _Draws(rows, self.largest[places], filters, self.uniforms[places])

    def weights(self, place: int) -> Row:
        """Weights of a whole row, see ``row_weights``."""
        return row_weights(self.rows[place], self.filters[place].temperature, self.largest[place])


_Path = Callable[[_Draws], Integers]


def draw(
    rows: Sequence[Row],
    filters: Sequence[Filters],
    uniforms: Floats,
    largest: npt.NDArray[np.float32] | None = None,
) -> Drawn:
    """Draw one token a row.

    Each row's result depends on nothing but its own logits, filters and uniform.

    Args:
        rows: per row, logits [vocab_size], the largest finite.
        filters: per row.
        uniforms: [rows] in [0, 1).
        largest: [rows], the largest logit of each, where it is known.
    """
    if largest is None:
        largest = np.array([row.max() for row in rows], np.float32)
    draws = _Draws(rows, largest, filters, uniforms)
    tokens, surprises = np.empty(len(rows), np.int64), np.full(len(rows), np.nan)
    paths: dict[_Path, list[int]] = {}
    for i, each in enumerate(filters):
        if each.max_surprise is not None:  # mirostat 2 (arXiv:2007.14966), which has no other filters
            bits = min(each.max_surprise, _MOST_SURPRISE)
            tokens[i], surprises[i] = whole_rows.draw_unsurprising(draws.weights(i), bits, float(uniforms[i]))
        else:
            paths.setdefault(_path(each, len(rows[i])), []).append(i)
    for path, chosen in paths.items():
        tokens[chosen] = path(draws.those(chosen))
    return Drawn(tokens, surprises)


def _path(filters: Filters, vocab_size: int) -> _Path:
    if filters.typical_p < 1.0:
        return _draw_typical
    if 0 < filters.top_k < vocab_size:
        return _draw_top_k
    if filters.top_p < 1.0:
        return _draw_nucleus
    return _draw_min_p if filters.min_p > 0.0 else _draw_any


def _draw_top_k(draws: _Draws) -> Integers:
    top_k = np.array([f.top_k for f in draws.filters], np.int64)
    candidates = top_candidates(draws.rows, top_k)
    weights = weigh(candidates.logits.astype(np.float64), draws.filters)
    weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
    return choose(candidates, weights, weights.sum(axis=1), draws.filters, draws.uniforms)


def _draw_nucleus(draws: _Draws) -> Integers:
    """Sort a few candidates if they hold the wanted share of the whole row's mass, else nothing."""
    count, vocab_size = len(draws.rows), len(draws.rows[0])
    width = vocab_size if vocab_size <= _MOST_SORTED else NUCLEUS
    total, wanted = np.empty(count), np.empty(count)
    tokens = np.full(count, -1, np.int64)
    for i, f in enumerate(draws.filters):
        cumulative = Cumulative(draws.weights(i))
        total[i] = cumulative.total
        wanted[i] = f.top_p * total[i]
        # The heaviest weighs 1, so that fewer tokens than the wanted mass cannot hold it.
        if wanted[i] > width:
            tokens[i] = _draw_wide(cumulative, f, wanted[i], draws.uniforms[i])
    tried = np.flatnonzero(tokens < 0)
    if len(tried):
        some = draws.those(tried.tolist())
        candidates = top_candidates(some.rows, np.full(len(tried), width))
        sorted_weights = weigh(candidates.logits.astype(np.float64), some.filters)
        enough = (sorted_weights.sum(axis=1) >= wanted[tried]) | (width == vocab_size)
        found = choose(candidates, sorted_weights, total[tried], some.filters, some.uniforms)
        tokens[tried[enough]] = found[enough]
    for i in np.flatnonzero(tokens < 0).tolist():
        cumulative = Cumulative(draws.weights(i))
        tokens[i] = _draw_wide(cumulative, draws.filters[i], wanted[i], draws.uniforms[i])
    return tokens


def _draw_wide(cumulative: Cumulative, filters: Filters, nucleus: float, share: float) -> int:
    return whole_rows.draw_nucleus(
        cumulative, float(nucleus), filters.min_p, filters.xtc_threshold, float(share)
    )


def _draw_min_p(draws: _Draws) -> Integers:
    """Sort those that are kept, unless they are too many."""
    # One float32 step of slack, so that rounding drops nobody here; choose decides exactly.
    spread = np.array([f.temperature * np.log(f.min_p) for f in draws.filters])
    threshold = np.nextafter((draws.largest + spread).astype(np.float32), np.float32(-np.inf))
    counts = [np.count_nonzero(row >= least) for row, least in zip(draws.rows, threshold, strict=True)]
    tokens = np.empty(len(draws.rows), np.int64)
    is_few = np.less_equal(counts, _MOST_SORTED)
    few, many = np.flatnonzero(is_few), np.flatnonzero(~is_few)
    if len(few):
        some = draws.those(few.tolist())
        candidates = candidates_above(some.rows, threshold[few])
        weights = weigh(candidates.logits.astype(np.float64), some.filters)
        tokens[few] = choose(candidates, weights, weights.sum(axis=1), some.filters, some.uniforms)
    if len(many):
        tokens[many] = _draw_any(draws.those(many.tolist()))
    return tokens


def _draw_typical(draws: _Draws) -> Integers:
    """Row by row: whom typical-p keeps is known only once all others are weighed."""
    each = zip(draws.rows, draws.largest, draws.filters, draws.uniforms.tolist(), strict=True)
    return np.array([_draw_typical_row(*one) for one in each], np.int64)


def _draw_typical_row(row: Row, largest: np.float32, filters: Filters, share: float) -> int:
    count = min(filters.top_k or len(row), len(row))
    alone = filters.top_p == 1.0 and filters.min_p == 0.0 and filters.xtc_threshold == 1.0
    if alone and count == len(row) > _MOST_SORTED:
        scaled = whole_rows.scaled_logits(row, filters.temperature, largest)
        return whole_rows.draw_typical(scaled, filters.typical_p, share)
    candidates = top_candidates([row], np.array([count]))
    weights = weigh(candidates.logits.astype(np.float64), [filters])
    weights[:, count:] = 0.0
    kept = weights[0] * is_kept(weights, weights.sum(axis=1), [filters])[0]
    kept[~_typical(kept / kept.sum(), filters.typical_p)] = 0.0
    exclude_top(kept, filters.xtc_threshold * kept.sum())
    return int(candidates.token_ids[0, inverse(kept, share * float(kept.sum()))])


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


def _draw_any(draws: _Draws) -> Integers:
    """Draw without sorting; of the filters, min-p and XTC apply."""
    each = enumerate(zip(draws.filters, draws.uniforms.tolist(), strict=True))
    return np.array(
        [whole_rows.draw_any(draws.weights(i), f.min_p, f.xtc_threshold, share) for i, (f, share) in each],
        np.int64,
    )


def weigh(logits: npt.NDArray[_F], filters: Sequence[Filters]) -> npt.NDArray[_F]:
    """exp(logits / temperature) in the logits' precision, scaled so that the largest of each row is 1."""
    temperature = np.array([f.temperature for f in filters], logits.dtype)
    weights: npt.NDArray[_F] = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights /= temperature[:, None]
    np.exp(weights, out=weights)
    return weights


def is_kept(weights: Floats, total: Floats, filters: Sequence[Filters]) -> npt.NDArray[np.bool_]:
    """Which of the sorted candidates top-p and min-p leave."""
    top_p = np.array([f.top_p for f in filters])
    min_p = np.array([f.min_p for f in filters])
    before = np.cumsum(weights, axis=1) - weights
    kept = (weights > 0.0) & (weights >= min_p[:, None])
    kept &= (before < (top_p * total)[:, None]) | (top_p[:, None] >= 1.0)
    return kept


def choose(
    candidates: Candidates, weights: Floats, total: Floats, filters: Sequence[Filters], uniforms: Floats
) -> Integers:
    """Apply top-p, min-p and XTC to the sorted candidates, and draw from what is left."""
    cumulative = np.cumsum(weights, axis=1)
    last = np.maximum(is_kept(weights, total, filters).sum(axis=1), 1) - 1
    for i, f in enumerate(filters):
        if f.xtc_threshold < 1.0:
            exclude_top(weights[i, : last[i] + 1], f.xtc_threshold * float(cumulative[i, last[i]]))
            cumulative[i] = np.cumsum(weights[i])
    rows = np.arange(len(weights))
    target = uniforms * cumulative[rows, last]
    chosen = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    return np.asarray(candidates.token_ids[rows, chosen], np.int64)
