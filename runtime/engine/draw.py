"""Random choice from many rows of logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from .top_candidates import Candidates, Integers, Logits, candidates_above, top_candidates

Floats = npt.NDArray[np.float64]
_Path = Callable[[Logits, Sequence[SamplingParams], Floats], Integers]

_NUCLEUS_WIDTHS = (64, 1024)  # candidates looked at before the whole vocabulary is sorted
_BLOCK = 128


def draw(logits: Logits, params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Draw one token a row: temperature, then top-k, then top-p, then min-p.

    Each row's result depends on nothing but its own logits, options and uniform.

    Args:
        logits: [rows, vocab_size], the largest of each row finite.
        params: per row; none greedy.
        uniforms: [rows] in [0, 1).
    """
    tokens = np.empty(len(logits), np.int64)
    paths: dict[_Path, list[int]] = {}
    for row, options in enumerate(params):
        paths.setdefault(_path(options, logits.shape[1]), []).append(row)
    for path, rows in paths.items():
        tokens[rows] = path(logits[rows], [params[row] for row in rows], uniforms[rows])
    return tokens


def _path(params: SamplingParams, vocab_size: int) -> _Path:
    if 0 < params.top_k < vocab_size:
        return _draw_top_k
    if params.top_p < 1.0:
        return _draw_nucleus
    return _draw_min_p if params.min_p > 0.0 else _draw_any


def _draw_top_k(logits: Logits, params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    top_k = np.array([options.top_k for options in params], np.int64)
    candidates = top_candidates(logits, top_k)
    weights = _weights(candidates.logits, params)
    weights[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
    return _choose(candidates, weights, weights.sum(axis=1), params, uniforms)


def _draw_nucleus(logits: Logits, params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Look at ever more candidates until they hold the wanted share of the whole row's mass."""
    total = _weights(logits, params).sum(axis=1)
    wanted = total * np.array([options.top_p for options in params])
    tokens = np.empty(len(logits), np.int64)
    rows = np.arange(len(logits))
    for width in (*_NUCLEUS_WIDTHS, logits.shape[1]):
        count = np.full(len(rows), min(width, logits.shape[1]), np.int64)
        candidates = top_candidates(logits[rows], count)
        some = [params[row] for row in rows.tolist()]
        weights = _weights(candidates.logits, some)
        found = _choose(candidates, weights, total[rows], some, uniforms[rows])
        enough = (weights.sum(axis=1) >= wanted[rows]) | (count == logits.shape[1])
        tokens[rows[enough]] = found[enough]
        rows = rows[~enough]
        if not len(rows):
            break
    return tokens


def _draw_min_p(logits: Logits, params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    # One float32 step of slack, so that rounding drops nobody here; _choose decides exactly.
    spread = np.array([options.temperature * np.log(options.min_p) for options in params])
    threshold = np.nextafter((logits.max(axis=1) + spread).astype(np.float32), np.float32(-np.inf))
    candidates = candidates_above(logits, threshold)
    weights = _weights(candidates.logits, params)
    return _choose(candidates, weights, weights.sum(axis=1), params, uniforms)


def _draw_any(logits: Logits, params: Sequence[SamplingParams], uniforms: Floats) -> Integers:
    """Inverse of the cumulative distribution in two levels: find the block, then the token in it."""
    weights = _weights(logits, params)
    starts = np.arange(0, logits.shape[1], _BLOCK)
    mass = np.cumsum(np.add.reduceat(weights, starts, axis=1), axis=1)
    target = uniforms * mass[:, -1]
    block = np.minimum((mass <= target[:, None]).sum(axis=1), len(starts) - 1)
    tokens = np.empty(len(logits), np.int64)
    for row, at in enumerate(block):
        inside = np.cumsum(weights[row, at * _BLOCK : (at + 1) * _BLOCK])
        before = mass[row, at - 1] if at else 0.0
        last = int(np.searchsorted(inside, inside[-1]))  # rounding must not reach a token of no weight
        tokens[row] = at * _BLOCK + min(
            int(np.searchsorted(inside, target[row] - before, side="right")), last
        )
    return tokens


def _weights(logits: Logits, params: Sequence[SamplingParams]) -> Floats:
    """exp(logits / temperature), scaled so that the largest of each row is 1."""
    temperature = np.array([options.temperature for options in params])[:, None]
    below: Floats = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        below /= temperature
    return np.asarray(np.exp(below, out=below), np.float64)


def _choose(
    candidates: Candidates, weights: Floats, total: Floats, params: Sequence[SamplingParams], uniforms: Floats
) -> Integers:
    """Apply top-p and min-p, which keep a prefix of the sorted candidates, and draw from what is left."""
    top_p = np.array([options.top_p for options in params])
    min_p = np.array([options.min_p for options in params])
    cumulative = np.cumsum(weights, axis=1)
    before = cumulative - weights
    kept = (weights > 0.0) & (weights >= min_p[:, None])
    kept &= (before < (top_p * total)[:, None]) | (top_p[:, None] >= 1.0)
    last = np.maximum(kept.sum(axis=1), 1) - 1
    rows = np.arange(len(weights))
    target = uniforms * cumulative[rows, last]
    chosen = np.minimum((cumulative <= target[:, None]).sum(axis=1), last)
    return np.asarray(candidates.token_ids[rows, chosen], np.int64)
