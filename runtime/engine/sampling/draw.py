"""Random choice from many rows of logits.

All that reads whole rows of a large vocabulary is done to one after the other, while it is in a core's cache:
that halves its time. Where a few candidates are left, those of all rows are sorted and drawn from together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import whole_rows
from .filters import Filters, Floats, choose, is_kept, typical, weigh
from .top_candidates import Found, Integers, Row, find_above, find_top, in_order
from .whole_rows import Cumulative, Weights, exclude_top, inverse

MOST_SORTED = 512  # candidates; from more of them, drawing without order is cheaper
NUCLEUS = 64  # candidates that usually hold what top-p keeps
_MOST_SURPRISE = 1000.0  # bits; two to minus this is still a float64


@dataclass(frozen=True, slots=True)
class Drawn:
    """Per row, the token drawn, and where ``max_surprise`` was given its bits of surprise, else NaN."""

    token_ids: Integers
    surprises: Floats


@dataclass(frozen=True, slots=True)
class _Draws:
    """Rows to draw from, at hand: their places in the result, likeliest tokens, filters and uniforms."""

    places: Integers
    rows: Sequence[Row]
    best: Integers
    filters: Sequence[Filters]
    uniforms: Floats

    def those(self, chosen: Sequence[int]) -> _Draws:
        """Some of them."""
        if len(chosen) == len(self.rows):
            return self
        rows, filters = [self.rows[i] for i in chosen], [self.filters[i] for i in chosen]
        return _Draws(self.places[chosen], rows, self.best[chosen], filters, self.uniforms[chosen])

    def weights(self, index: int) -> Weights:
        """Weights of a whole row."""
        return Weights.of(self.rows[index], self.filters[index].temperature, int(self.best[index]))


@dataclass(frozen=True, slots=True)
class _Shortlist:
    """The only tokens that some rows may give, and the mass of all tokens of each; NaN is their own."""

    draws: _Draws
    found: Found
    total: Floats


class Drawing:
    """Draws one token for each of many rows, which come group by group and are not kept.

    A row's result depends on nothing but its own logits, filters and uniform.

    Args:
        count: how many rows will come.
    """

    def __init__(self, count: int) -> None:
        self._tokens = np.zeros(count, np.int64)
        self._surprises = np.full(count, np.nan)
        self._short: list[_Shortlist] = []

    def add(
        self,
        places: Sequence[int],
        rows: Sequence[Row],
        best: Sequence[int],
        filters: Sequence[Filters],
        uniforms: Floats,
    ) -> None:
        """Look at rows of logits [vocab_size], whose ``best`` tokens have the largest, finite ones."""
        draws = _Draws(np.array(places, np.int64), rows, np.array(best, np.int64), filters, uniforms)
        paths: dict[_Path, list[int]] = {}
        for i, each in enumerate(filters):
            paths.setdefault(_path(each, len(rows[i])), []).append(i)
        for path, chosen in paths.items():
            path(self, draws.those(chosen))

    def finish(self) -> Drawn:
        """Draw from what was kept of the rows."""
        narrow = [each for each in self._short if each.found.counts.max() <= MOST_SORTED]
        wide = [[each] for each in self._short if each.found.counts.max() > MOST_SORTED]
        for some in [narrow, *wide] if narrow else wide:
            filters = [f for each in some for f in each.draws.filters]
            candidates = in_order([each.found for each in some])
            weights = weigh(candidates.logits.astype(np.float64), filters)
            top_k = np.array([f.top_k or weights.shape[1] for f in filters])
            weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
            total = np.concatenate([each.total for each in some])
            total = np.where(np.isnan(total), weights.sum(axis=1), total)
            uniforms = np.concatenate([each.draws.uniforms for each in some])
            places = np.concatenate([each.draws.places for each in some])
            self._tokens[places] = choose(candidates, weights, total, filters, uniforms)
        return Drawn(self._tokens, self._surprises)

    def top_k(self, draws: _Draws) -> None:
        """Keep those that top-k leaves."""
        found = find_top(draws.rows, np.array([f.top_k for f in draws.filters], np.int64))
        self._short.append(_Shortlist(draws, found, np.full(len(draws.rows), np.nan)))

    def nucleus(self, draws: _Draws) -> None:
        """Keep a few candidates if they hold the wanted share of the whole row's mass, else draw at once."""
        vocab_size = len(draws.rows[0])
        width = vocab_size if vocab_size <= MOST_SORTED else NUCLEUS
        weights = [draws.weights(i) for i in range(len(draws.rows))]
        cumulative = [Cumulative(each.values) for each in weights]
        heaviest = np.array([each.heaviest for each in weights])
        total = np.array([each.total for each in cumulative]) / heaviest
        wanted = np.array([f.top_p for f in draws.filters]) * total
        # The heaviest weighs 1, so that fewer tokens than the wanted mass cannot hold it.
        is_narrow = wanted <= width
        tried = np.flatnonzero(is_narrow)
        if len(tried):
            some = draws.those(tried.tolist())
            found = find_top(some.rows, np.full(len(tried), width))
            held = _masses(found, [weights[i] for i in tried])
            enough = (held >= wanted[tried]) | (width == vocab_size)
            is_narrow[tried[~enough]] = False
            if enough.any():
                kept = some.those(np.flatnonzero(enough).tolist())
                self._short.append(_Shortlist(kept, found.those(enough), total[tried[enough]]))
        for i in np.flatnonzero(~is_narrow).tolist():
            f, share = draws.filters[i], float(draws.uniforms[i])
            self._tokens[draws.places[i]] = whole_rows.draw_nucleus(
                cumulative[i],
                weights[i].heaviest,
                float(wanted[i] * heaviest[i]),
                f.min_p,
                f.xtc_threshold,
                share,
            )

    def min_p(self, draws: _Draws) -> None:
        """Keep those that min-p leaves, unless they are too many."""
        # One float32 step of slack, so that rounding drops nobody here; ``choose`` decides exactly.
        lowest = [
            float(row[best]) + f.temperature * math.log(f.min_p)
            for row, best, f in zip(draws.rows, draws.best.tolist(), draws.filters, strict=True)
        ]
        threshold = np.nextafter(np.array(lowest, np.float32), np.float32(-np.inf))
        counts = [np.count_nonzero(row >= least) for row, least in zip(draws.rows, threshold, strict=True)]
        is_few = np.less_equal(counts, MOST_SORTED)
        few, many = np.flatnonzero(is_few).tolist(), np.flatnonzero(~is_few).tolist()
        if few:
            some = draws.those(few)
            found = find_above(some.rows, threshold[few])
            self._short.append(_Shortlist(some, found, np.full(len(few), np.nan)))
        if many:
            self.any(draws.those(many))

    def any(self, draws: _Draws) -> None:
        """Draw without sorting; of the filters, min-p and XTC apply."""
        for i, f in enumerate(draws.filters):
            share = float(draws.uniforms[i])
            token = whole_rows.draw_any(draws.weights(i), f.min_p, f.xtc_threshold, share)
            self._tokens[draws.places[i]] = token

    def unsurprising(self, draws: _Draws) -> None:
        """Mirostat 2 (arXiv:2007.14966), which has no other filters."""
        for i, f in enumerate(draws.filters):
            bits = min(f.max_surprise or 0.0, _MOST_SURPRISE)
            share, place = float(draws.uniforms[i]), draws.places[i]
            drawn = whole_rows.draw_unsurprising(draws.weights(i), bits, share)
            self._tokens[place], self._surprises[place] = drawn

    def typical(self, draws: _Draws) -> None:
        """Row by row: whom typical-p keeps is known only once all others are weighed."""
        each = zip(draws.rows, draws.best.tolist(), draws.filters, draws.uniforms.tolist(), strict=True)
        self._tokens[draws.places] = [_draw_typical(*one) for one in each]


_Path = Callable[[Drawing, _Draws], None]


def _path(filters: Filters, vocab_size: int) -> _Path:
    if filters.max_surprise is not None:
        return Drawing.unsurprising
    if filters.typical_p < 1.0:
        return Drawing.typical
    if 0 < filters.top_k < vocab_size:
        return Drawing.top_k
    if filters.top_p < 1.0:
        return Drawing.nucleus
    return Drawing.min_p if filters.min_p > 0.0 else Drawing.any


def draw(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> Drawn:
    """Draw one token a row, see ``Drawing``.

    Args:
        rows: per row, logits [vocab_size], the largest finite.
        filters: per row.
        uniforms: [rows] in [0, 1).
    """
    drawing = Drawing(len(rows))
    drawing.add(range(len(rows)), rows, [int(row.argmax()) for row in rows], filters, uniforms)
    return drawing.finish()


def _masses(found: Found, weights: Sequence[Weights]) -> Floats:
    """What each row's candidates weigh together, in the heaviest's weights."""
    own = np.split(found.token_ids, np.cumsum(found.counts)[:-1])
    pairs = zip(own, weights, strict=True)
    return np.array([each.values[ids].sum(dtype=np.float64) / each.heaviest for ids, each in pairs])


def _draw_typical(row: Row, best: int, filters: Filters, share: float) -> int:
    count = min(filters.top_k or len(row), len(row))
    alone = filters.top_p == 1.0 and filters.min_p == 0.0 and filters.xtc_threshold == 1.0
    if alone and count == len(row) > MOST_SORTED:
        scaled = whole_rows.scaled_logits(row, filters.temperature, best)
        return whole_rows.draw_typical(scaled, filters.typical_p, share)
    candidates = in_order([find_top([row], np.array([count]))])
    weights = weigh(candidates.logits.astype(np.float64), [filters])
    weights[:, count:] = 0.0
    kept = weights[0] * is_kept(weights, weights.sum(axis=1), [filters])[0]
    kept[~typical(kept / kept.sum(), filters.typical_p)] = 0.0
    exclude_top(kept, filters.xtc_threshold * kept.sum())
    return int(candidates.token_ids[0, inverse(kept, share * float(kept.sum()))])
