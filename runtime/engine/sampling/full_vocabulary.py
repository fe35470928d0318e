"""Full-vocabulary sampling: sample from whole rows without sorting, in a few passes each.

Filters are applied by rejection sampling: draw a token from all until the filter keeps it. This is exact and
cheap, since one pass over the row decides whether a single token is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .splitmix import uniform

_BLOCK = 256
_PRODUCTS = 4096  # products per dot product: bounds rounding errors, and stays below BLAS's threading limit
_PARTS = 4  # a row is read in this many parts where one part may decide
_TRIES = 2  # rejected draws before the kept tokens are collected
_SURELY = 1.0 - 1e-4  # safety factor for the rounding of a float32 sum
# Exponents up to this bound need no shift: their exponentials, and the sum of these, are finite and nonzero.
_MAX_UNSHIFTED = 40.0

Row = npt.NDArray[np.float32]  # [vocab_size]
_F = TypeVar("_F", np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class Weights:
    """Unnormalized probabilities of a row, and the largest of them."""

    values: Row
    heaviest: float

    @classmethod
    def of(cls, logits: Row, temperature: float, best: int) -> Weights:
        """Return the weights of ``logits`` [vocab_size]; ``best`` is a token with the largest logit."""
        values = scaled_logits(logits, temperature, best)
        np.exp(values, out=values)
        return cls(values, float(values[best]))


def scaled_logits(logits: Row, temperature: float, best: int) -> Row:
    """Return logits / temperature, shifted if their exponentials could overflow or vanish."""
    factor, largest = np.float32(1.0 / temperature), logits[best]
    if abs(float(largest)) * float(factor) <= _MAX_UNSHIFTED:
        unshifted: Row = logits * factor
        return unshifted
    scaled: Row = logits - largest
    with np.errstate(over="ignore"):  # a tiny temperature gives -inf for all but the largest, as intended
        scaled *= factor
    return scaled


def block_sums(weights: Row) -> npt.NDArray[np.float32]:
    """Return sums of blocks of at most ``_BLOCK`` strided weights, so that the additions vectorize."""
    blocks = -(-len(weights) // _BLOCK)
    full = len(weights) // blocks * blocks
    sums: npt.NDArray[np.float32] = weights[:full].reshape(-1, blocks).sum(axis=0)
    sums[: len(weights) - full] += weights[full:]
    return sums


def mass(weights: Row) -> float:
    """Return the sum of a row."""
    return float(block_sums(weights).sum(dtype=np.float64))


def log_sum_exp(logits: Row, best: int) -> float:
    """Return the log-sum-exp of ``logits`` [vocab_size]; ``best`` is a token with the largest logit."""
    weights = Weights.of(logits, 1.0, best)
    return float(logits[best]) + math.log(mass(weights.values) / weights.heaviest)


def products_mass(left: Row, right: Row) -> float:
    """Return the dot product of two rows, computed in blocks so that rounding errors stay small."""
    blocks = max(1, len(left) // _PRODUCTS)
    full = len(left) // blocks * blocks
    parts = left[:full].reshape(blocks, 1, -1) @ right[:full].reshape(blocks, -1, 1)
    return float(parts.sum(dtype=np.float64)) + float(left[full:] @ right[full:])


class Cumulative:
    """Inverse transform sampling in two levels: find the block, then the token in it."""

    def __init__(self, weights: Row) -> None:
        self.weights = weights
        self._sums = block_sums(weights).astype(np.float64)
        self._mass = np.cumsum(self._sums)
        self.total = float(self._mass[-1])

    def token(self, share: float) -> int:
        """Return the token at this share, in [0, 1), of the total weight."""
        target = share * self.total
        block = _place(self._mass, target)
        inside = self.weights[block :: len(self._sums)]
        place = inverse(inside, target - float(self._mass[block] - self._sums[block]))
        return block + place * len(self._sums)

    def tokens(self, share: float) -> Iterator[int]:
        """Yield draws without end: the first with ``share``, the others with uniforms derived from it."""
        key = int(share * 2**53)
        for place in itertools.count():
            yield self.token(uniform(key, place) if place else share)

    def first_kept(self, share: float, is_kept: Callable[[int], bool]) -> int:
        """Return the first drawn token that is kept."""
        return next(filter(is_kept, self.tokens(share)))


def inverse(weights: npt.NDArray[_F], target: float) -> int:
    """Return the first index at which the cumulative sum exceeds ``target``; its weight is never 0."""
    return _place(np.cumsum(weights, dtype=np.float64), target)


def _place(cumulative: npt.NDArray[np.float64], target: float) -> int:
    place = int(cumulative.searchsorted(target, side="right"))
    return place if place < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def exclude_top(weights: npt.NDArray[_F], bound: float, heaviest: float = 1.0) -> None:
    """Set all weights >= ``bound`` to 0 except the smallest of them (the last of equal ones), in place.

    XTC, by its author's definition: https://github.com/oobabooga/text-generation-webui/pull/6335.
    """
    if bound > heaviest:
        return
    top = np.flatnonzero(weights >= bound)
    if len(top) > 1:
        last = len(top) - 1 - int(np.argmin(weights[top][::-1]))
        weights[np.delete(top, last)] = 0.0


def draw_any(weights: Weights, min_p: float, xtc_threshold: float, share: float) -> int:
    """Sample from the tokens that min-p and XTC keep; ``weights`` may be overwritten."""
    values, least = weights.values, min_p * weights.heaviest
    if xtc_threshold == 1.0:
        return _draw_above(Cumulative(values), least, share)
    if least > 0.0:
        _drop_below(values, least)
    exclude_top(values, xtc_threshold * mass(values), weights.heaviest)
    return Cumulative(values).token(share)


def draw_nucleus(
    cumulative: Cumulative, heaviest: float, nucleus: float, min_p: float, xtc_threshold: float, share: float
) -> int:
    """Sample from the most likely tokens that together have the weight ``nucleus`` (top-p)."""
    weights, total = cumulative.weights, cumulative.total
    if min_p > 0.0 or xtc_threshold < 1.0:
        left = weights.copy()
        _drop_below(left, min_p * heaviest)
        if xtc_threshold < 1.0:
            # A nucleus of thousands of tokens has the mass asked for, and no more; min-p may leave less.
            exclude_top(left, xtc_threshold * min(nucleus, mass(left)), heaviest)
        cumulative = Cumulative(left)

    def is_kept(token: int) -> bool:
        weight = weights[token]
        if _outweigh(weights, lambda part: weights[part] < weight, total - nucleus):
            return True
        before = products_mass(weights, (weights > weight).astype(np.float32))
        before += float(weight) * np.count_nonzero(weights[:token] == weight)
        return bool(before < nucleus)

    return cumulative.first_kept(share, is_kept)


def draw_typical(scaled: Row, typical_p: float, share: float) -> int:
    """Sample from the tokens whose surprise is closest to the entropy (arXiv:2202.00666).

    Surprise is log(total) - scaled, and entropy is its mean. Their distance is therefore that of the scaled
    logit from its mean.
    """
    weights = np.exp(scaled)
    cumulative = Cumulative(weights)
    with np.errstate(invalid="ignore"):
        moment = products_mass(weights, scaled)
    if np.isnan(moment):  # 0 * -inf: tokens without weight must add 0
        moment = products_mass(weights, np.maximum(scaled, np.finfo(np.float32).min))
    mean, wanted = moment / cumulative.total, typical_p * cumulative.total

    def is_kept(token: int) -> bool:
        own = scaled[token]
        mirrored = np.float32(2.0 * mean - float(own))
        low, high = min(own, mirrored), max(own, mirrored)

        def is_farther(part: slice) -> npt.NDArray[np.bool_]:
            some = scaled[part]
            farther: npt.NDArray[np.bool_] = (some < low) | (some > high)
            return farther

        if _outweigh(weights, is_farther, cumulative.total - wanted):
            return True
        closer = (scaled > low) & (scaled < high)
        before = products_mass(weights, closer.astype(np.float32))
        before += float(weights[token]) * np.count_nonzero(scaled[:token] == own)
        return bool(before < wanted)

    return cumulative.first_kept(share, is_kept)


def draw_below_surprise(weights: Weights, bits: float, share: float) -> tuple[int, float]:
    """Sample from the tokens of at most ``bits`` bits of surprise; return the token and its surprise."""
    cumulative = Cumulative(weights.values)
    token = _draw_above(cumulative, min(cumulative.total * 2.0**-bits, weights.heaviest), share)
    return token, math.log2(cumulative.total / float(weights.values[token]))


def _draw_above(cumulative: Cumulative, least: float, share: float) -> int:
    """Sample from the tokens whose weight is at least ``least``."""
    weights = cumulative.weights
    for token in itertools.islice(cumulative.tokens(share), _TRIES):
        if weights[token] >= least:
            return token
    kept = np.flatnonzero(weights >= least)
    own = weights[kept]
    return int(kept[inverse(own, uniform(int(share * 2**53), _TRIES) * float(own.sum(dtype=np.float64)))])


def _drop_below(weights: Row, least: float) -> None:
    weights *= (weights >= least).astype(np.float32)  # several times as fast as assigning through a mask


def _outweigh(weights: Row, which: Callable[[slice], npt.NDArray[np.bool_]], bound: float) -> bool:
    """Whether the selected tokens surely weigh more than ``bound``; False if that is not certain.

    The row is read in parts and the search ends early, which decides most tokens.
    """
    found, size = 0.0, -(-len(weights) // _PARTS)
    for start in range(0, len(weights), size):
        part = slice(start, start + size)
        found += products_mass(weights[part], which(part).astype(np.float32))
        if found * _SURELY > bound:
            return True
    return False
