"""Random choice from many rows of logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from .top_candidates import Candidates, Integers, Row, candidates_above, grouped, top_candidates

Floats = npt.NDArray[np.float64]
_Path = Callable[[Sequence[Row], Sequence[SamplingParams], Floats], Integers]

_NUCLEUS_WIDTHS = (64, 512, 4096)  # candidates looked at before the whole vocabulary is sorted
_BLOCK = 128
_COLDEST = 1e-30  # what a float32 still divides by

_F = TypeVar("_F", np.float32, np.float64)


def draw(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Draw one token a row: temperature, then top-k, top-p, min-p and typical-p.

    Each row's result depends on nothing but its own logits, options and uniform.

    Args:
        rows: per row, logits [vocab_size], the largest finite.
        params: per row; none greedy.
        uniforms: [rows] in [0, 1).
    """
    tokens = np.empty(len(rows), np.int64)
    paths: dict[_Path, list[int]] = {}
    for i, options in enumerate(params):
        paths.setdefault(_path(options, len(rows[i])), []).append(i)
    for path, chosen in paths.items():
        tokens[chosen] = path([rows[i] for i in chosen], [params[i] for i in chosen], uniforms[chosen])
    return tokens


def _path(params: SamplingParams, vocab_size: int) -> _Path:
    if params.typical_p < 1.0:
        return _draw_typical
    if 0 < params.top_k < vocab_size:
        return _draw_top_k
    if params.top_p < 1.0:
        return _draw_nucleus
    return _draw_min_p if params.min_p > 0.0 else _draw_any


def _draw_top_k(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    top_k = np.array([options.top_k for options in params], np.int64)
    candidates = top_candidates(rows, top_k)
    weights = _weights(candidates.logits.astype(np.float64), params)
    weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
    return _choose(candidates, weights, weights.sum(axis=1), params, uniforms)


def _draw_nucleus(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Look at ever more candidates until they hold the wanted share of the whole row's mass."""
    total = _mass(rows, params)
    wanted = total * np.array([options.top_p for options in params])
    tokens = np.empty(len(rows), np.int64)
    left = np.arange(len(rows))
    for width in (*_NUCLEUS_WIDTHS, len(rows[0])):
        count = np.full(len(left), min(width, len(rows[0])), np.int64)
        candidates = top_candidates([rows[i] for i in left.tolist()], count)
        some = [params[i] for i in left.tolist()]
        weights = _weights(candidates.logits.astype(np.float64), some)
        enough = (weights.sum(axis=1) >= wanted[left]) | (count == len(rows[0]))
        found = _choose(candidates, weights, total[left], some, uniforms[left])
        tokens[left[enough]] = found[enough]
        left = left[~enough]
        if not len(left):
            break
    return tokens


def _draw_min_p(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    # One float32 step of slack, so that rounding drops nobody here; _choose decides exactly.
    spread = np.array([options.temperature * np.log(options.min_p) for options in params])
    largest = np.array([row.max() for row in rows])
    threshold = np.nextafter((largest + spread).astype(np.float32), np.float32(-np.inf))
    candidates = candidates_above(rows, threshold)
    weights = _weights(candidates.logits.astype(np.float64), params)
    return _choose(candidates, weights, weights.sum(axis=1), params, uniforms)


def _draw_typical(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Row by row, over all candidates: whom typical-p keeps is known only once all are weighed."""
    tokens = np.empty(len(rows), np.int64)
    for i, (row, options) in enumerate(zip(rows, params, strict=True)):
        count = min(options.top_k or len(row), len(row))
        candidates = top_candidates([row], np.array([count]))
        weights = _weights(candidates.logits.astype(np.float64), [options])
        weights[:, count:] = 0.0
        kept = weights[0] * _kept(weights, weights.sum(axis=1), [options])[0]
        kept[~_typical(kept / kept.sum(), options.typical_p)] = 0.0
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


def _draw_any(rows: Sequence[Row], params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Inverse of the cumulative distribution in two levels: find the block, then the token in it."""
    tokens = np.empty(len(rows), np.int64)
    for chosen, logits in grouped(rows):
        weights = _weights(logits, params[chosen])
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


def _mass(rows: Sequence[Row], params: Sequence[SamplingParams]) -> Floats:
    """Per row, the sum of all weights."""
    mass = np.empty(len(rows), np.float64)
    for chosen, logits in grouped(rows):
        # Row by row: the order of a sum over several rows could depend on how many there are.
        mass[chosen] = [weights.sum(dtype=np.float64) for weights in _weights(logits, params[chosen])]
    return mass


def _weights(logits: npt.NDArray[_F], params: Sequence[SamplingParams]) -> npt.NDArray[_F]:
    """exp(logits / temperature) in the logits' precision, scaled so that the largest of each row is 1."""
    temperature = np.array([max(options.temperature, _COLDEST) for options in params], logits.dtype)
    weights: npt.NDArray[_F] = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights /= temperature[:, None]
    np.exp(weights, out=weights)
    return weights


def _kept(weights: Floats, total: Floats, params: Sequence[SamplingParams]) -> npt.NDArray[np.bool_]:
    """Which of the sorted candidates top-p and min-p leave."""
    top_p = np.array([options.top_p for options in params])
    min_p = np.array([options.min_p for options in params])
    before = np.cumsum(weights, axis=1) - weights
    kept = (weights > 0.0) & (weights >= min_p[:, None])
    kept &= (before < (top_p * total)[:, None]) | (top_p[:, None] >= 1.0)
    return kept


def _choose(
    candidates: Candidates, weights: Floats, total: Floats, params: Sequence[SamplingParams], uniforms: Floats
) -> Integers:
    """Apply top-p and min-p, which keep a prefix of the sorted candidates, and draw from what is left."""
    cumulative = np.cumsum(weights, axis=1)
    last = np.maximum(_kept(weights, total, params).sum(axis=1), 1) - 1
    rows = np.arange(len(weights))
    target = uniforms * cumulative[rows, last]
    chosen = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    return np.asarray(candidates.token_ids[rows, chosen], np.int64)
