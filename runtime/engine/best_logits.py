"""Sample from the k largest logits alone, if that gives the same token as sampling from all logits.

Weights are w_i = exp((l_i - l_0) / T), in descending order. Known are the k largest logits, and the
log-sum-exp of all logits at T = 1. Top-p keeps a token while the weights before it sum to less than
top_p * total. So ``total`` decides only how many tokens are kept. If a lower and an upper bound of ``total``
keep the same tokens, the sampled token is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from ...errors import ProviderRuntimeError
from ...providers.base import BestLogits, BestLogitsRunner, Runner
from .sampling.filters import Filters, Floats, choose, is_kept, weigh
from .sampling.random_sampling import MAX_SORTED, NUCLEUS
from .sampling.sampler import NO_TOKEN, BatchLogitsProcessor, Sample, TokenLogprob, is_wanted, sample
from .sampling.sampling_state import SamplingState
from .sampling.top_candidates import Candidates, Row
from .schedule.scheduler import StepPlan

# Relative error of a float32 sum of exponentials over a vocabulary, on the CPU or on a device.
_ROUNDING = 1e-4


def forward(
    runner: Runner, plan: StepPlan, processors: Sequence[BatchLogitsProcessor]
) -> list[npt.NDArray[np.float32] | BestLogits]:
    """Run a step; return per row its logits, or only the largest ones where these may be enough to sample."""
    count = runner.info.top_logits
    if not count:
        return list(runner.forward(plan.rows))
    for row, request in zip(plan.rows, plan.requests, strict=True):
        row.best_suffice = (
            row.num_logits == 1
            and not request.awaits_prompt_logprobs
            and best_may_suffice(request.sampling, count, processors)
        )
    return cast(BestLogitsRunner, runner).forward_best(plan.rows)


def logits_at(
    logits: npt.NDArray[np.float32] | BestLogits, position: int
) -> npt.NDArray[np.float32] | BestLogits:
    """Return the logits of one position of a row; ``BestLogits`` have one position only."""
    return logits if isinstance(logits, BestLogits) else logits[position]


def sample_rows(
    rows: Sequence[Row | BestLogits],
    states: Sequence[SamplingState],
    processors: Sequence[BatchLogitsProcessor] = (),
) -> list[Sample]:
    """Sample the next token of each row as ``sample`` does; fetch all logits only of rows that need them."""
    samples: dict[int, Sample] = {}
    whole: dict[int, Row] = {}
    for i, (row, state) in enumerate(zip(rows, states, strict=True)):
        if not isinstance(row, BestLogits):
            whole[i] = row
        elif (drawn := sample_best(row, state)) is not None:
            samples[i] = drawn
        else:
            try:
                whole[i] = row.whole()
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


def sample_best(best: BestLogits, state: SamplingState) -> Sample | None:
    """Sample a request's next token from its largest logits; return None if these are not enough.

    Log-probabilities are relative to all logits, up to rounding in the log-sum-exp.
    """
    if not np.isfinite(best.logsumexp):
        return None
    token: int | None = int(best.token_ids[0])
    if not state.params.greedy:
        token = draw_from_best(best, state.filters(), state.uniform())
    if token is None:
        return None
    return Sample(
        token, () if state.params.logprobs is None else _logprobs(best, token, state.params.logprobs)
    )


def draw_from_best(best: BestLogits, filters: Filters, uniform: float) -> int | None:
    """Return the token that ``sample_random`` draws from all logits; None if the largest do not decide it.

    Args:
        best: a row with a finite log-sum-exp.
        filters: without ``max_surprise`` and ``typical_p``.
        uniform: in [0, 1).
    """
    allowed = min(filters.top_k or best.vocab_size, best.vocab_size)
    is_nucleus = filters.top_p < 1.0 and allowed == best.vocab_size > MAX_SORTED
    count = min(len(best.logits), NUCLEUS if is_nucleus else MAX_SORTED)
    logits = best.logits[:count]
    if allowed == best.vocab_size <= len(best.logits):
        return None  # ``sample_random`` uses another algorithm for rows without top-k
    weights = weigh(logits[None].astype(np.float64), [filters])
    if allowed <= count:
        weights[:, allowed:] = 0.0
        total = weights.sum(axis=1)
    else:
        bounds = _totals(best, logits, filters, weights[0], allowed)
        if not _ends_within(weights, bounds, filters, has_top_k=allowed < best.vocab_size):
            return None
        total = np.array(bounds[:1])
    candidates = Candidates(best.token_ids[None, :count], logits[None])
    return int(choose(candidates, weights, total, [filters], np.array([uniform]))[0])


def _ends_within(weights: Floats, totals: tuple[float, float], filters: Filters, *, has_top_k: bool) -> bool:
    """Whether the filters keep the same tokens for both totals, and drop at least one known token."""
    least, most = (int(is_kept(weights, np.array([total]), [filters]).sum()) for total in totals)
    if least != most or most >= weights.shape[1]:
        return False
    if has_top_k:
        return True
    if filters.top_p < 1.0:  # ``sample_random`` sorts a row only if its top candidates hold the nucleus
        return float(weights.sum()) >= filters.top_p * totals[1]
    return float(weights[0, -1]) < filters.min_p * (1 - _ROUNDING)


def _totals(
    best: BestLogits,
    logits: npt.NDArray[np.float32],
    filters: Filters,
    weights: Floats,
    allowed: int,
) -> tuple[float, float]:
    """Return lower and upper bounds of the total weight of the ``allowed`` largest logits.

    With a = 1 / T, the n unknown tokens have x = exp(l - l_0) <= x_k, and their x sum to R. Their weights
    x^a = x x^(a-1) sum to at most R x_k^(a-1) if a >= 1, and to at least that if a <= 1. The other bound is
    that of n equal values, n (R / n)^a (Jensen's inequality).
    """
    exponent, others = 1.0 / filters.temperature, best.vocab_size - len(logits)
    plain = np.exp(logits.astype(np.float64) - float(logits[0]))
    mass, known = float(np.exp(best.logsumexp - float(logits[0]))), float(plain.sum())
    rest_least = max(0.0, mass * (1 - _ROUNDING) - known)
    rest_most = max(0.0, mass * (1 + _ROUNDING) - known)
    smallest, least = float(plain[-1]), 0.0
    most = others * smallest**exponent
    if exponent >= 1.0:
        most = min(most, rest_most * smallest ** (exponent - 1.0))
        least = others * (rest_least / others) ** exponent
    elif smallest > 0.0:
        most = min(most, others * (rest_most / others) ** exponent)
        least = rest_least * smallest ** (exponent - 1.0)
    if allowed < best.vocab_size:
        least, most = 0.0, min(most, (allowed - len(logits)) * smallest**exponent)
    found = float(weights.sum())
    return (found + least) * (1 - _ROUNDING), (found + most) * (1 + _ROUNDING)


def _logprobs(best: BestLogits, token: int, count: int) -> tuple[TokenLogprob, ...]:
    ids = best.token_ids.tolist()
    places = [ids.index(token), *range(min(count, len(ids)))]
    return tuple(
        TokenLogprob(ids[place], float(best.logits[place]) - best.logsumexp, place + 1)
        for place in dict.fromkeys(places)
    )
