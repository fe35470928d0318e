"""Sample from the k largest logits alone, if that gives the same token as sampling from all logits.

Weights are w_i = exp((l_i - l_0) / T), in descending order. Known are the k largest logits, and the
log-sum-exp of all logits at T = 1. Top-p keeps a token while the weights before it sum to less than
top_p * total. So ``total`` decides only how many tokens are kept. If a lower and an upper bound of ``total``
keep the same tokens, the sampled token is certain.

Rows are computed together, as arrays [rows, k]: at 32 rows NumPy's calls cost more than their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....errors import ProviderRuntimeError
from ....providers.base import BestLogits
from .filters import FilterColumns, Filters, Floats, choose, num_kept, weigh
from .random_sampling import MAX_SORTED, NUCLEUS
from .sampler import NO_TOKEN, BatchLogitsProcessor, Sample, TokenLogprob, is_wanted, sample
from .sampling_state import SamplingState
from .top_candidates import Candidates, Integers, Row

# Relative error of a float32 sum of exponentials over a vocabulary, on the CPU or on a device.
_ROUNDING = 1e-4


def sample_rows(
    rows: Sequence[Row | BestLogits],
    states: Sequence[SamplingState],
    processors: Sequence[BatchLogitsProcessor] = (),
) -> list[Sample]:
    """Sample the next token of each row as ``sample`` does; fetch all logits only of rows that need them."""
    best = [i for i, row in enumerate(rows) if isinstance(row, BestLogits)]
    if not best:
        return sample([row for row in rows if not isinstance(row, BestLogits)], states, processors)
    drawn = sample_best([row for row in rows if isinstance(row, BestLogits)], [states[i] for i in best])
    samples = {i: token for i, token in zip(best, drawn, strict=True) if token is not None}
    whole: dict[int, Row] = {}
    for i, row in enumerate(rows):
        if i in samples:
            continue
        try:
            whole[i] = row.whole() if isinstance(row, BestLogits) else row
        except ProviderRuntimeError as error:
            samples[i] = Sample(NO_TOKEN, error=str(error))
    if whole:
        drawn_whole = sample(list(whole.values()), [states[i] for i in whole], processors)
        samples |= zip(whole, drawn_whole, strict=True)
    return [samples[i] for i in range(len(rows))]


def best_may_suffice(
    state: SamplingState, count: int, processors: Sequence[BatchLogitsProcessor] = ()
) -> bool:
    """Whether the ``count`` largest logits may be enough to sample a request's next token.

    With top-p and min-p this depends on the logits; ``sample_best`` returns None if they were not enough.
    """
    params = state.params
    if state.processors or any(is_wanted(processor, state) for processor in processors):
        return False
    if params.logprob_token_ids or (params.logprobs or 0) > count:
        return False
    if params.greedy:
        return True
    filters = state.filters()
    if filters.max_surprise is not None or filters.typical_p < 1.0:
        return False
    return 0 < filters.top_k <= count or filters.top_p < 1.0 or filters.min_p > 0.0


def sample_best(rows: Sequence[BestLogits], states: Sequence[SamplingState]) -> list[Sample | None]:
    """Sample the next token of each request from its largest logits; None where these are not enough.

    Log-probabilities are relative to all logits, up to rounding in the log-sum-exp.
    """
    tokens: list[int | None] = [None] * len(rows)
    random: list[int] = []
    for i, (row, state) in enumerate(zip(rows, states, strict=True)):
        if not math.isfinite(row.logsumexp):
            continue
        if state.params.greedy:
            tokens[i] = int(row.token_ids[0])
        else:
            random.append(i)
    if random:
        filters = [states[i].filters() for i in random]
        uniforms = np.array([states[i].uniform() for i in random])
        for i, token in zip(random, draw([rows[i] for i in random], filters, uniforms), strict=True):
            tokens[i] = token
    return [
        None if token is None else Sample(token, _logprobs(row, token, state.params.logprobs))
        for row, state, token in zip(rows, states, tokens, strict=True)
    ]


def draw(rows: Sequence[BestLogits], filters: Sequence[Filters], uniforms: Floats) -> list[int | None]:
    """Return the tokens that ``sample_random`` draws from all logits; None where the largest do not decide.

    Args:
        rows: with finite log-sum-exps.
        filters: per row, without ``max_surprise`` and ``typical_p``.
        uniforms: [rows] in [0, 1).
    """
    tokens: list[int | None] = [None] * len(rows)
    widths: dict[int, list[int]] = {}
    for i, (row, f) in enumerate(zip(rows, filters, strict=True)):
        allowed = min(f.top_k or row.vocab_size, row.vocab_size)
        if allowed == row.vocab_size <= len(row.logits):
            continue  # ``sample_random`` uses another algorithm for rows without top-k
        is_nucleus = f.top_p < 1.0 and allowed == row.vocab_size > MAX_SORTED
        widths.setdefault(min(len(row.logits), NUCLEUS if is_nucleus else MAX_SORTED), []).append(i)
    for width, group in widths.items():
        drawn, certain = _draw_alike(
            [rows[i] for i in group], [filters[i] for i in group], uniforms[group], width
        )
        for i, token, is_certain in zip(group, drawn.tolist(), certain.tolist(), strict=True):
            tokens[i] = token if is_certain else None
    return tokens


def _draw_alike(
    rows: Sequence[BestLogits], filters: Sequence[Filters], uniforms: Floats, width: int
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Draw from the first ``width`` logits of each row; return the tokens, and which of them are certain."""
    logits = np.stack([row.logits[:width] for row in rows])
    token_ids = np.stack([row.token_ids[:width] for row in rows])
    columns = FilterColumns.of(filters)
    vocab_size = np.array([row.vocab_size for row in rows])
    allowed = np.minimum(np.where(columns.top_k > 0, columns.top_k, vocab_size), vocab_size)
    weights = weigh(logits.astype(np.float64), columns.temperature)
    weights[np.arange(width) >= allowed[:, None]] = 0.0
    known = weights.sum(axis=1)
    least, most = known, known
    certain = allowed <= width
    if not certain.all():
        logsumexp = np.array([row.logsumexp for row in rows])
        low, high = _totals(logits, logsumexp, known, columns.temperature, vocab_size, allowed)
        least, most = np.where(certain, known, low), np.where(certain, known, high)
    kept = num_kept(weights, least, columns)
    if not certain.all():
        certain |= (kept == num_kept(weights, most, columns)) & (kept < width) & (
            (allowed < vocab_size)
            # ``sample_random`` sorts a row only if its top candidates hold the nucleus, or min-p ends in them
            | np.where(
                columns.top_p < 1.0,
                known >= columns.top_p * most,
                weights[:, -1] < columns.min_p * (1 - _ROUNDING),
            )
        )  # fmt: skip
    return choose(Candidates(token_ids, logits), weights, kept, filters, uniforms), certain


def _totals(
    logits: npt.NDArray[np.float32],
    logsumexp: Floats,
    known: Floats,
    temperature: Floats,
    vocab_size: Integers,
    allowed: Integers,
) -> tuple[Floats, Floats]:
    """Return lower and upper bounds [rows] of the total weight of the ``allowed`` largest logits.

    With a = 1 / T, the n unknown tokens have x = exp(l - l_0) <= x_k, and their x sum to R. Their weights
    x^a = x x^(a-1) sum to at most R x_k^(a-1) if a >= 1, and to at least that if a <= 1. The other bound is
    that of n equal values, n (R / n)^a (Jensen's inequality).
    """
    largest = logits[:, 0].astype(np.float64)
    plain = np.exp(logits.astype(np.float64) - largest[:, None])
    mass, top, smallest = np.exp(logsumexp - largest), plain.sum(axis=1), plain[:, -1]
    rest_least = np.maximum(0.0, mass * (1 - _ROUNDING) - top)
    rest_most = np.maximum(0.0, mass * (1 + _ROUNDING) - top)
    others = np.maximum(vocab_size - logits.shape[1], 1)  # rows without others are decided without bounds
    exponent = 1.0 / temperature
    with np.errstate(all="ignore"):  # a branch that ``where`` does not take may divide by 0 or overflow
        equal_least = others * (rest_least / others) ** exponent
        equal_most = others * (rest_most / others) ** exponent
        power = smallest ** (exponent - 1.0)
        cold = exponent >= 1.0
        most = np.where(cold, rest_most * power, np.where(smallest > 0.0, equal_most, np.inf))
        least = np.where(cold, equal_least, np.where(smallest > 0.0, rest_least * power, 0.0))
        most = np.minimum(most, others * smallest**exponent)
        some = np.minimum(most, (allowed - logits.shape[1]) * smallest**exponent)
    least, most = np.where(allowed < vocab_size, 0.0, least), np.where(allowed < vocab_size, some, most)
    return (known + least) * (1 - _ROUNDING), (known + most) * (1 + _ROUNDING)


def _logprobs(best: BestLogits, token: int, count: int | None) -> tuple[TokenLogprob, ...]:
    if count is None:
        return ()
    ids = best.token_ids.tolist()
    places = [ids.index(token), *range(min(count, len(ids)))]
    return tuple(
        TokenLogprob(ids[place], float(best.logits[place]) - best.logsumexp, place + 1)
        for place in dict.fromkeys(places)
    )
