"""Random sampling from many rows of logits.

Work on a whole vocabulary is done row by row, while the row is in a core's cache, which halves its time. If
filters leave few candidates, those of all rows are sorted and sampled together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import full_vocabulary
from .filters import FilterColumns, Filters, Floats, choose, num_kept, typical, weigh
from .full_vocabulary import Cumulative, Weights, exclude_top, inverse
from .top_candidates import Found, Integers, Row, find_above, find_top, in_order

MAX_SORTED = 512  # candidates; with more, sampling without sorting is cheaper
NUCLEUS = 64  # number of top candidates that usually hold the nucleus of top-p
_MAX_SURPRISE = 1000.0  # bits; 2**-1000 is still a float64


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Per row, the sampled token, and its surprise in bits if ``max_surprise`` was set, else NaN."""

    token_ids: Integers
    surprises: Floats


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to sample from: indices in the result, logits, most likely tokens, filters and uniforms."""

    places: Integers
    rows: Sequence[Row]
    best: Integers
    filters: Sequence[Filters]
    uniforms: Floats

    def those(self, chosen: Sequence[int]) -> _Rows:
        """Return a subset of the rows."""
        if len(chosen) == len(self.rows):
            return self
        rows, filters = [self.rows[i] for i in chosen], [self.filters[i] for i in chosen]
        return _Rows(self.places[chosen], rows, self.best[chosen], filters, self.uniforms[chosen])

    def weights(self, index: int) -> Weights:
        """Return the weights of all tokens of a row."""
        return Weights.of(self.rows[index], self.filters[index].temperature, int(self.best[index]))


@dataclass(frozen=True, slots=True)
class _Shortlist:
    """The candidates of some rows, and the total weight of each row; NaN is the sum of its candidates."""

    draws: _Rows
    found: Found
    total: Floats


class RandomSampler:
    """Sample one token for each row. Rows are added in groups, and whole rows are not kept.

    The result of a row depends only on its own logits, filters and uniform.

    Args:
        count: total number of rows.
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
        """Add rows.

        Args:
            places: indices of the rows in the result.
            rows: logits [vocab_size] per row.
            best: a most likely token per row; its logit must be finite.
            filters: filters per row.
            uniforms: [rows] in [0, 1).
        """
        draws = _Rows(np.array(places, np.int64), rows, np.array(best, np.int64), filters, uniforms)
        paths: dict[_Path, list[int]] = {}
        for i, each in enumerate(filters):
            paths.setdefault(_path(each, len(rows[i])), []).append(i)
        for path, chosen in paths.items():
            path(self, draws.those(chosen))

    def finish(self) -> RandomTokens:
        """Sample from the candidates of all rows that were not sampled in ``add``; return all results."""
        narrow = [each for each in self._short if each.found.counts.max() <= MAX_SORTED]
        wide = [[each] for each in self._short if each.found.counts.max() > MAX_SORTED]
        for some in [narrow, *wide] if narrow else wide:
            filters = [f for each in some for f in each.draws.filters]
            candidates = in_order([each.found for each in some])
            columns = FilterColumns.of(filters)
            weights = weigh(candidates.logits.astype(np.float64), columns.temperature)
            top_k = np.where(columns.top_k > 0, columns.top_k, weights.shape[1])
            weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
            total = np.concatenate([each.total for each in some])
            total = np.where(np.isnan(total), weights.sum(axis=1), total)
            uniforms = np.concatenate([each.draws.uniforms for each in some])
            places = np.concatenate([each.draws.places for each in some])
            kept = num_kept(weights, total, columns)
            self._tokens[places] = choose(candidates, weights, kept, filters, uniforms)
        return RandomTokens(self._tokens, self._surprises)

    def top_k(self, draws: _Rows) -> None:
        """Shortlist the candidates of top-k."""
        found = find_top(draws.rows, np.array([f.top_k for f in draws.filters], np.int64))
        self._short.append(_Shortlist(draws, found, np.full(len(draws.rows), np.nan)))

    def nucleus(self, draws: _Rows) -> None:
        """Shortlist the top candidates if they hold the nucleus of top-p; else sample from the whole row."""
        vocab_size = len(draws.rows[0])
        width = vocab_size if vocab_size <= MAX_SORTED else NUCLEUS
        weights = [draws.weights(i) for i in range(len(draws.rows))]
        cumulative = [Cumulative(each.values) for each in weights]
        heaviest = np.array([each.heaviest for each in weights])
        total = np.array([each.total for each in cumulative]) / heaviest
        wanted = np.array([f.top_p for f in draws.filters]) * total
        # Each weight is at most 1, so a nucleus of weight w needs at least w tokens.
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
            self._tokens[draws.places[i]] = full_vocabulary.draw_nucleus(
                cumulative[i],
                weights[i].heaviest,
                float(wanted[i] * heaviest[i]),
                f.min_p,
                f.xtc_threshold,
                share,
            )

    def min_p(self, draws: _Rows) -> None:
        """Shortlist the candidates of min-p; if there are too many, sample from the whole row."""
        # The threshold is one float32 step lower, so that rounding drops no token; ``choose`` is exact.
        lowest = [
            float(row[best]) + f.temperature * math.log(f.min_p)
            for row, best, f in zip(draws.rows, draws.best.tolist(), draws.filters, strict=True)
        ]
        threshold = np.nextafter(np.array(lowest, np.float32), np.float32(-np.inf))
        counts = [np.count_nonzero(row >= least) for row, least in zip(draws.rows, threshold, strict=True)]
        is_few = np.less_equal(counts, MAX_SORTED)
        few, many = np.flatnonzero(is_few).tolist(), np.flatnonzero(~is_few).tolist()
        if few:
            some = draws.those(few)
            found = find_above(some.rows, threshold[few])
            self._short.append(_Shortlist(some, found, np.full(len(few), np.nan)))
        if many:
            self.any(draws.those(many))

    def any(self, draws: _Rows) -> None:
        """Sample from the whole row; of the filters, only min-p and XTC apply."""
        for i, f in enumerate(draws.filters):
            share = float(draws.uniforms[i])
            token = full_vocabulary.draw_any(draws.weights(i), f.min_p, f.xtc_threshold, share)
            self._tokens[draws.places[i]] = token

    def mirostat(self, draws: _Rows) -> None:
        """Sample with Mirostat 2 (arXiv:2007.14966), without other filters."""
        for i, f in enumerate(draws.filters):
            bits = min(f.max_surprise or 0.0, _MAX_SURPRISE)
            share, place = float(draws.uniforms[i]), draws.places[i]
            drawn = full_vocabulary.draw_below_surprise(draws.weights(i), bits, share)
            self._tokens[place], self._surprises[place] = drawn

    def typical(self, draws: _Rows) -> None:
        """Sample with typical-p, row by row."""
        each = zip(draws.rows, draws.best.tolist(), draws.filters, draws.uniforms.tolist(), strict=True)
        self._tokens[draws.places] = [_draw_typical(*one) for one in each]


_Path = Callable[[RandomSampler, _Rows], None]


def _path(filters: Filters, vocab_size: int) -> _Path:
    if filters.max_surprise is not None:
        return RandomSampler.mirostat
    if filters.typical_p < 1.0:
        return RandomSampler.typical
    if 0 < filters.top_k < vocab_size:
        return RandomSampler.top_k
    if filters.top_p < 1.0:
        return RandomSampler.nucleus
    return RandomSampler.min_p if filters.min_p > 0.0 else RandomSampler.any


def sample_random(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> RandomTokens:
    """Sample one token for each row; see ``RandomSampler``.

    Args:
        rows: logits [vocab_size] per row; the largest must be finite.
        filters: filters per row.
        uniforms: [rows] in [0, 1).
    """
    sampler = RandomSampler(len(rows))
    sampler.add(range(len(rows)), rows, [int(row.argmax()) for row in rows], filters, uniforms)
    return sampler.finish()


def _masses(found: Found, weights: Sequence[Weights]) -> Floats:
    """Return the total weight of each row's candidates, relative to the row's largest weight."""
    own = np.split(found.token_ids, np.cumsum(found.counts)[:-1])
    pairs = zip(own, weights, strict=True)
    return np.array([each.values[ids].sum(dtype=np.float64) / each.heaviest for ids, each in pairs])


def _draw_typical(row: Row, best: int, filters: Filters, share: float) -> int:
    count = min(filters.top_k or len(row), len(row))
    alone = filters.top_p == 1.0 and filters.min_p == 0.0 and filters.xtc_threshold == 1.0
    if alone and count == len(row) > MAX_SORTED:
        scaled = full_vocabulary.scaled_logits(row, filters.temperature, best)
        return full_vocabulary.draw_typical(scaled, filters.typical_p, share)
    candidates = in_order([find_top([row], np.array([count]))])
    columns = FilterColumns.of([filters])
    weights = weigh(candidates.logits.astype(np.float64), columns.temperature)
    weights[:, count:] = 0.0
    kept = weights[0]
    kept[num_kept(weights, weights.sum(axis=1), columns)[0] :] = 0.0
    kept[~typical(kept / kept.sum(), filters.typical_p)] = 0.0
    exclude_top(kept, filters.xtc_threshold * kept.sum())
    return int(candidates.token_ids[0, inverse(kept, share * float(kept.sum()))])
