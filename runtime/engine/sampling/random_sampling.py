"""Random sampling of many rows: from sorted candidates, or from whole rows where these do not decide.

Candidates are the few most likely tokens, of all rows in one array. They come from whole rows on the host, or
are the largest logits that a device has selected. A host's row is worked on while it is in a core's cache,
which halves its time; only its candidates are kept until all rows are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....providers.base import BestLogits
from ....records import dataclass
from .candidates import Integers, Row, Shortlist, in_order, shortlist_above, shortlist_top
from .filters import ROUNDING, FilterColumns, Filters, Floats, WeightedCandidates, weigh
from .whole_rows import WholeRow

NO_TOKEN = -1

_MAX_SORTED = 512  # candidates; with more, sampling without sorting is cheaper
# Number of most likely tokens that usually hold the nucleus of top-p, or the drawn token where all are kept.
_NUCLEUS = 64
_AROUND = np.array([[1 - ROUNDING], [1 + ROUNDING]])
_NO_LOGITS: Row = np.empty(0, np.float32)
_NO_FILTER = Filters()


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Per row, the sampled token, and its surprise in bits if ``max_surprise`` was set, else NaN."""

    token_ids: Integers
    surprises: Floats


@dataclass(slots=True)
class _Draw:
    """One row on its way to a token.

    Args:
        place: its index in the result.
        logits: [vocab_size].
        best: a most likely token.
        filters: its filters.
        share: its uniform.
        whole: the weights of all tokens, where they were needed.
        passed: the most likely tokens, where all are kept and the drawn one is not among these.
    """

    place: int
    logits: Row
    best: int
    filters: Filters
    share: float
    whole: WholeRow | None = None
    passed: Integers | None = None

    def keeps_all(self) -> bool:
        """Return whether no filter applies. Then the most likely tokens come first, and all others after."""
        return not 0 < self.filters.top_k < len(self.logits) and _keeps_all(self.filters)

    def num_sorted(self) -> int:
        """Return how many of the most likely tokens decide, or may decide; 0 if too many would."""
        f, vocab_size = self.filters, len(self.logits)
        if f.max_surprise < math.inf:
            return 0
        if f.typical_p < 1.0:
            alone = f.top_p == 1.0 and f.min_p == 0.0 and f.xtc_threshold == 1.0
            count = min(f.top_k or vocab_size, vocab_size)
            return 0 if alone and count == vocab_size > _MAX_SORTED else count
        if 0 < f.top_k < vocab_size:
            return f.top_k
        if f.top_p < 1.0:
            whole = self.weighed()
            width = vocab_size if vocab_size <= _MAX_SORTED else _NUCLEUS
            # Each weight is at most that of the heaviest, so a nucleus of w such weights needs w tokens.
            return width if f.top_p * whole.total <= width * whole.heaviest else 0
        return min(_NUCLEUS, vocab_size) if self.keeps_all() else 0

    def likely(self) -> Shortlist | None:
        """Return the tokens that min-p keeps, if it alone decides and they are few."""
        f = self.filters
        if f.min_p == 0.0 or f.top_p < 1.0 or f.typical_p < 1.0 or f.max_surprise < math.inf:
            return None
        # The threshold is one float32 step lower, so that rounding drops no token; the draw is exact.
        lowest = np.float32(float(self.logits[self.best]) + f.temperature * math.log(f.min_p))
        threshold = np.nextafter(lowest, np.float32(-np.inf))
        if np.count_nonzero(self.logits >= threshold) > _MAX_SORTED:
            return None
        return shortlist_above([self.logits], threshold[None])

    def weighed(self) -> WholeRow:
        """Return the weights of all tokens."""
        if self.whole is None:
            self.whole = WholeRow(self.logits, self.filters.temperature, self.best)
        return self.whole


@dataclass(frozen=True, slots=True)
class _Pool:
    """Rows with shortlists, and the total weight of each; NaN is the sum of its candidates."""

    draws: Sequence[_Draw]
    shortlist: Shortlist
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
        self._pools: list[_Pool] = []

    def add(
        self,
        places: Sequence[int],
        rows: Sequence[Row],
        best: Sequence[int],
        filters: Sequence[Filters],
        uniforms: Sequence[float],
    ) -> None:
        """Add rows.

        Args:
            places: indices of the rows in the result.
            rows: logits [vocab_size] per row.
            best: a most likely token per row; its logit must be finite.
            filters: filters per row.
            uniforms: [rows] in [0, 1).
        """
        draws = [_Draw(*row) for row in zip(places, rows, best, filters, uniforms, strict=True)]
        sorted_draws, counts, others = list[_Draw](), list[int](), list[_Draw]()
        for draw in draws:
            if count := draw.num_sorted():
                sorted_draws.append(draw)
                counts.append(count)
            elif shortlist := draw.likely():
                self._keep([draw], shortlist)
            else:
                others.append(draw)
        if sorted_draws:
            shortlist = shortlist_top([draw.logits for draw in sorted_draws], np.array(counts))
            enough = _hold_tokens(sorted_draws, shortlist)
            others += [draw for draw, held in zip(sorted_draws, enough, strict=True) if not held]
            kept = [draw for draw, held in zip(sorted_draws, enough, strict=True) if held]
            if kept:
                self._keep(kept, shortlist.of_rows(np.array(enough)))
        for draw in others:
            whole = draw.weighed()
            self._tokens[draw.place] = token = whole.draw(draw.filters, draw.share, draw.passed)
            if draw.filters.max_surprise < math.inf:
                self._surprises[draw.place] = whole.surprise(token)

    def finish(self) -> RandomTokens:
        """Sample from the candidates of all rows that were not sampled in ``add``; return all results."""
        narrow = [pool for pool in self._pools if pool.shortlist.counts.max() <= _MAX_SORTED]
        wide = [[pool] for pool in self._pools if pool.shortlist.counts.max() > _MAX_SORTED]
        for pools in [narrow, *wide] if narrow else wide:
            draws = [draw for pool in pools for draw in pool.draws]
            columns = FilterColumns.of([draw.filters for draw in draws])
            candidates = in_order([pool.shortlist for pool in pools])
            weighted = WeightedCandidates(candidates.logits, columns)
            total = np.concatenate([pool.total for pool in pools])
            kept = weighted.num_kept(np.where(np.isnan(total), weighted.known, total))
            chosen = weighted.draw(kept, np.array([draw.share for draw in draws]))
            places = [draw.place for draw in draws]
            self._tokens[places] = candidates.token_ids[np.arange(len(draws)), chosen]
        return RandomTokens(self._tokens, self._surprises)

    def _keep(self, draws: Sequence[_Draw], shortlist: Shortlist) -> None:
        """Keep the shortlists of rows until all are drawn together, and forget the rows."""
        total = np.array(
            [math.nan if draw.whole is None else draw.whole.total / draw.whole.heaviest for draw in draws]
        )
        forgotten = [replace(draw, logits=_NO_LOGITS, whole=None) for draw in draws]
        self._pools.append(_Pool(forgotten, shortlist, total))


def sample_random(rows: Sequence[Row], filters: Sequence[Filters], uniforms: Floats) -> RandomTokens:
    """Sample one token for each row; see ``RandomSampler``.

    Args:
        rows: logits [vocab_size] per row; the largest must be finite.
        filters: filters per row.
        uniforms: [rows] in [0, 1).
    """
    sampler = RandomSampler(len(rows))
    sampler.add(range(len(rows)), rows, [int(row.argmax()) for row in rows], filters, uniforms.tolist())
    return sampler.finish()


def draw_best(rows: Sequence[BestLogits], filters: Sequence[Filters], uniforms: Sequence[float]) -> list[int]:
    """Return the tokens that ``sample_random`` draws from all logits; NO_TOKEN where these do not decide.

    The library of CPU kernels has it, too (``BestDraws``), in a tenth of the time for few rows.

    Args:
        rows: of one step, with at least one logit and finite log-sum-exps.
        filters: per row, without ``max_surprise`` and ``typical_p``.
        uniforms: [rows] in [0, 1).
    """
    widths = [_num_first(f, len(row.logits), row.vocab_size) for f, row in zip(filters, rows, strict=True)]
    tokens = [NO_TOKEN] * len(rows)
    for width in set(widths) - {0}:
        group = [i for i, row_width in enumerate(widths) if row_width == width]
        drawn = _draw_first(
            [rows[i] for i in group],
            [filters[i] for i in group],
            np.array([uniforms[i] for i in group]),
            width,
        )
        for i, token in zip(group, drawn, strict=True):
            tokens[i] = token
    return tokens


def _num_first(filters: Filters, count: int, vocab_size: int) -> int:
    """Return how many of the ``count`` largest logits decide as ``sample_random`` does; 0 is none."""
    if 0 < filters.top_k < vocab_size:
        return min(count, _MAX_SORTED)
    if vocab_size <= count:
        return 0  # it draws from the whole row, in another order
    # It draws a longer nucleus from the whole row, too, and so the others where all are kept.
    is_short = filters.top_p < 1.0 and vocab_size > _MAX_SORTED
    return min(count, _NUCLEUS if is_short or _keeps_all(filters) else _MAX_SORTED)


def _keeps_all(filters: Filters) -> bool:
    """Return whether no filter but top-k applies."""
    return filters._replace(temperature=1.0, top_k=0) == _NO_FILTER


def _hold_tokens(draws: Sequence[_Draw], shortlist: Shortlist) -> list[bool]:
    """Return whether the token of each row is among its candidates.

    A draw without a filter then becomes one from the most likely tokens alone.
    """
    enough = [True] * len(draws)
    stops = np.cumsum(shortlist.counts).tolist()
    for i, (draw, count, stop) in enumerate(zip(draws, shortlist.counts.tolist(), stops, strict=True)):
        part, whole = slice(stop - count, stop), draw.whole
        if draw.keeps_all():
            enough[i] = _is_first(draw, shortlist.token_ids[part], shortlist.logits[part])
        elif whole is not None and count < len(draw.logits):
            held = whole.weights[shortlist.token_ids[part]].sum(dtype=np.float64)
            enough[i] = bool(held >= draw.filters.top_p * whole.total)
    return enough


def _is_first(draw: _Draw, token_ids: Integers, logits: Row) -> bool:
    """Return whether a token that is drawn from all is among the most likely ones."""
    first = np.argsort(-logits, kind="stable")[:_NUCLEUS]
    known = float(weigh(logits[None, first], np.array([draw.filters.temperature])).sum())
    whole = draw.weighed()
    target = draw.share * whole.total / whole.heaviest
    if target < known:
        draw.filters, draw.share = draw.filters._replace(top_k=len(first)), target / known
        return True
    draw.passed = token_ids[first]
    return False


def _draw_first(
    rows: Sequence[BestLogits], filters: Sequence[Filters], uniforms: Floats, width: int
) -> list[int]:
    """Draw from the first ``width`` logits of each row; NO_TOKEN where these do not decide.

    Weights are w_i = exp((l_i - l_0) / T), in descending order. Known are the first ones, and the log-sum-exp
    of all logits at T = 1. Top-p keeps a token while the weights before it sum to less than top_p * total. So
    ``total`` decides only how many tokens are kept, and the place of the sampled token never falls with that
    number. If a lower and an upper bound of ``total`` sample the same token, it is certain. Where all tokens
    are kept, the place is that of a share of ``total``, which the first tokens may not reach.
    """
    columns, vocab_size = FilterColumns.of(filters), rows[0].vocab_size
    logits = np.concatenate([row.logits[:width] for row in rows]).reshape(len(rows), -1)
    candidates = WeightedCandidates(logits, columns)
    certain = columns.top_k <= width
    if certain.all():
        places = candidates.draw(candidates.num_kept(candidates.known), uniforms)
    else:
        totals = _totals(rows, logits, candidates.known, columns)
        kept, kept_at_most = candidates.num_kept(np.where(certain, candidates.known, totals))
        # ``sample_random`` sorts a whole row only if the first hold the nucleus, or min-p ends in them.
        ends = candidates.known >= columns.top_p * totals[1]
        ends |= (columns.top_p == math.inf) & (candidates.weights[:, -1] < columns.min_p * (1 - ROUNDING))
        ends |= columns.top_k < vocab_size
        ends &= kept_at_most < width
        places, is_same = candidates.draw(kept, uniforms), kept == kept_at_most
        if (ends & ~is_same).any():
            other = places == candidates.draw(kept_at_most, uniforms)
            other[[row for row, *_ in columns.rare]] = False  # their weights were changed by the first draw
            is_same |= other
        certain |= ends & is_same
        all_kept = np.array([_keeps_all(f) for f in filters]) & ~(columns.top_k < vocab_size)
        if all_kept.any():
            least, most = candidates.places(uniforms * totals)
            places = np.where(all_kept, least, places)
            certain |= all_kept & (least == most) & (least < width)
    return [
        int(row.token_ids[place]) if is_certain else NO_TOKEN
        for row, place, is_certain in zip(rows, places.tolist(), certain.tolist(), strict=True)
    ]


def _totals(
    rows: Sequence[BestLogits], logits: npt.NDArray[np.float32], known: Floats, filters: FilterColumns
) -> Floats:
    """Return lower and upper bounds [2, rows] of the total weight of the logits that top-k keeps.

    With a = 1 / T, the n unknown tokens have x = exp(l - l_0) <= x_k, and their x sum to R. Their weights
    x^a = x x^(a-1) sum to at most R x_k^(a-1) if a >= 1, and to at least that if a <= 1. The other bound is
    that of n equal values, n (R / n)^a (Jensen's inequality).
    """
    vocab_size, exponent = rows[0].vocab_size, 1.0 / filters.temperature
    others = vocab_size - logits.shape[1]
    weights = weigh(logits, np.ones(len(rows)))
    smallest, top = np.maximum(weights[:, -1], 1e-300), weights.sum(axis=1)
    total = np.exp(np.array([row.logsumexp for row in rows]) - logits[:, 0])
    rest = np.maximum(0.0, total * _AROUND - top)  # R, at least and at most
    rest[0] *= [row.exact for row in rows]
    with np.errstate(over="ignore"):  # a tiny temperature's exponent is huge
        equal = others * (rest / others) ** exponent
        unequal = rest * smallest ** (exponent - 1.0)
        each = smallest**exponent
    least = np.minimum(equal[0], unequal[0])
    most = np.minimum(np.maximum(equal[1], unequal[1]), others * each)
    is_cut = filters.top_k < vocab_size
    if is_cut.any():
        least = np.where(is_cut, 0.0, least)
        behind = np.where(is_cut, filters.top_k, math.inf) - logits.shape[1]
        most = np.minimum(most, behind * np.where(is_cut, each, 1.0))
    bounds: Floats = (known + np.stack([least, most])) * _AROUND
    return bounds
