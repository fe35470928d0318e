"""Draws from all tokens of a row, without sorting, in a few passes.

Filters are applied by rejection sampling: draw a token from all until the filter keeps it. This is exact and
cheap, since one pass over the row decides whether a single token is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .candidates import Integers, Row
from .filters import Filters, exclude_top
from .splitmix import uniform

_BLOCK = 256
_PRODUCTS = 4096  # products per dot product: bounds rounding errors, and stays below BLAS's threading limit
_PARTS = 4  # a row is read in this many parts where one part may decide
_TRIES = 2  # rejected draws before the kept tokens are collected
_TRIES_OF_TOP = 32  # the same after XTC, where collecting means sorting
_SURELY = 1.0 - 1e-4  # safety factor for the rounding of a float32 sum
# Exponents up to this bound need no shift: their exponentials, and the sum of these, are finite and nonzero.
_MAX_UNSHIFTED = 40.0
_MAX_SURPRISE = 1000.0  # bits; 2**-1000 is still a float64

_F = TypeVar("_F", np.float32, np.float64)


class WholeRow:
    """The unnormalized probabilities of all tokens of a row.

    Args:
        logits: [vocab_size].
        temperature: divides the logits.
        best: a token with the largest logit, which must be finite.

    Attributes:
        weights: float32 [vocab_size].
        heaviest: the largest weight.
        total: the sum of the weights.
    """

    def __init__(self, logits: Row, temperature: float, best: int) -> None:
        self._logits, self._temperature, self._best = logits, temperature, best
        self.weights = _scaled(logits, temperature, best)
        np.exp(self.weights, out=self.weights)
        self.heaviest = float(self.weights[best])
        self._cumulative = _Cumulative(self.weights)
        self.total = self._cumulative.total

    def draw(self, filters: Filters, share: float, passed: Integers | None = None) -> int:
        """Sample a token at ``share``, in [0, 1); of the filters, all but top-k apply.

        Typical-p and Mirostat are applied alone. Without a filter, the most likely tokens come first;
        ``passed`` are those, and do not reach the share.
        """
        if passed is not None:
            return self._draw_behind(passed, share)
        if filters.max_surprise < math.inf:
            bits = min(filters.max_surprise, _MAX_SURPRISE)
            return self._draw_above(min(self.total * 2.0**-bits, self.heaviest), share)
        if filters.typical_p < 1.0:
            return self._cumulative.first_kept(share, self._typical(filters.typical_p * self.total))
        least = filters.min_p * self.heaviest
        nucleus = filters.top_p * self.total if filters.top_p < 1.0 else math.inf
        if nucleus == math.inf and filters.xtc_threshold == 1.0:
            return self._draw_above(least, share)
        if filters.xtc_threshold < 1.0:
            return self._draw_without_top(filters.xtc_threshold, least, nucleus, share)
        cumulative = self._cumulative
        if filters.min_p > 0.0:
            cumulative = _Cumulative(self._heavier(least))
        return cumulative.first_kept(share, self._in_nucleus(nucleus))

    def _draw_behind(self, passed: Integers, share: float) -> int:
        weights = self.weights.copy()
        weights[passed] = 0
        others = _Cumulative(weights)
        if others.total == 0.0:
            return int(passed[-1])
        before = float(self.weights[passed].sum(dtype=np.float64))
        return others.token(max(0.0, share * self.total - before) / others.total)

    def _heavier(self, least: float) -> Row:
        """Return the weights of at least ``least``, and 0 for the others."""
        left: Row = self.weights * (self.weights >= least).astype(np.float32)  # faster than through a mask
        return left

    def _draw_without_top(self, threshold: float, least: float, nucleus: float, share: float) -> int:
        """Sample after XTC, which may leave little of a nucleus, or one token, beside many outside of it."""
        left = self._heavier(least)
        # A nucleus of thousands of tokens has the mass asked for, and no more; min-p may leave less.
        bound = threshold * min(nucleus, _mass(left))
        inside = left.copy()
        exclude_top(left, bound, self.heaviest)
        cumulative = _Cumulative(left)
        if nucleus == math.inf:
            return cumulative.token(share)
        is_kept = self._in_nucleus(nucleus)
        for token in itertools.islice(cumulative.tokens(share), _TRIES_OF_TOP):
            if is_kept(token):
                return token
        order = np.argsort(-self.weights, kind="stable")
        mass = np.cumsum(self.weights[order], dtype=np.float64)
        inside[order[int(mass.searchsorted(nucleus)) + 1 :]] = 0
        exclude_top(inside, bound, self.heaviest)
        return _Cumulative(inside).token(uniform(int(share * 2**53), _TRIES_OF_TOP))

    def surprise(self, token: int) -> float:
        """Return the surprise of a token in bits."""
        return math.log2(self.total / float(self.weights[token]))

    def _draw_above(self, least: float, share: float) -> int:
        """Sample from the tokens whose weight is at least ``least``."""
        for token in itertools.islice(self._cumulative.tokens(share), _TRIES):
            if self.weights[token] >= least:
                return token
        kept = np.flatnonzero(self.weights >= least)
        weights = self.weights[kept]
        target = uniform(int(share * 2**53), _TRIES) * float(weights.sum(dtype=np.float64))
        return int(kept[_inverse(weights, target)])

    def _in_nucleus(self, nucleus: float) -> Callable[[int], bool]:
        """Return whether a token is among the most likely ones that together have the weight ``nucleus``."""
        weights = self.weights

        def is_kept(token: int) -> bool:
            weight = weights[token]
            if _outweigh(weights, lambda part: weights[part] < weight, self.total - nucleus):
                return True
            before = _products_mass(weights, (weights > weight).astype(np.float32))
            before += float(weight) * np.count_nonzero(weights[:token] == weight)
            return bool(before < nucleus)

        return is_kept

    def _typical(self, mass: float) -> Callable[[int], bool]:
        """Return whether a token is among those of surprise closest to the entropy that weigh ``mass``.

        Surprise is log(total) - scaled logit, and entropy is its mean. Their distance is therefore that of
        the scaled logit from its mean (locally typical sampling, arXiv:2202.00666).
        """
        weights, scaled = self.weights, _scaled(self._logits, self._temperature, self._best)
        with np.errstate(invalid="ignore"):
            moment = _products_mass(weights, scaled)
        if np.isnan(moment):  # 0 * -inf: tokens without weight must add 0
            moment = _products_mass(weights, np.maximum(scaled, np.finfo(np.float32).min))
        mean = moment / self.total

        def is_kept(token: int) -> bool:
            logit = scaled[token]
            mirrored = np.float32(2.0 * mean - float(logit))
            low, high = min(logit, mirrored), max(logit, mirrored)

            def is_farther(part: slice) -> npt.NDArray[np.bool_]:
                farther: npt.NDArray[np.bool_] = (scaled[part] < low) | (scaled[part] > high)
                return farther

            if _outweigh(weights, is_farther, self.total - mass):
                return True
            closer = (scaled > low) & (scaled < high)
            before = _products_mass(weights, closer.astype(np.float32))
            before += float(weights[token]) * np.count_nonzero(scaled[:token] == logit)
            return bool(before < mass)

        return is_kept


def log_sum_exp(logits: Row, best: int) -> float:
    """Return the log-sum-exp of ``logits`` [vocab_size]; ``best`` is a token with the largest logit."""
    weights = np.exp(_scaled(logits, 1.0, best))
    return float(logits[best]) + math.log(_mass(weights) / float(weights[best]))


class _Cumulative:
    """Inverse transform sampling in two levels: find the block, then the token in it."""

    def __init__(self, weights: Row) -> None:
        self._weights = weights
        self._sums = _block_sums(weights).astype(np.float64)
        self._mass = np.cumsum(self._sums)
        self.total = float(self._mass[-1])

    def token(self, share: float) -> int:
        """Return the token at this share, in [0, 1), of the total weight."""
        target = share * self.total
        block = _place(self._mass, target)
        inside = self._weights[block :: len(self._sums)]
        place = _inverse(inside, target - float(self._mass[block] - self._sums[block]))
        return block + place * len(self._sums)

    def tokens(self, share: float) -> Iterator[int]:
        """Yield draws without end: the first with ``share``, the others with uniforms derived from it."""
        key = int(share * 2**53)
        for place in itertools.count():
            yield self.token(uniform(key, place) if place else share)

    def first_kept(self, share: float, is_kept: Callable[[int], bool]) -> int:
        """Return the first drawn token that is kept."""
        return next(filter(is_kept, self.tokens(share)))


def _scaled(logits: Row, temperature: float, best: int) -> Row:
    """Return logits / temperature, shifted if their exponentials could overflow or vanish."""
    factor, largest = np.float32(1.0 / temperature), logits[best]
    if abs(float(largest)) * float(factor) <= _MAX_UNSHIFTED:
        unshifted: Row = logits * factor
        return unshifted
    scaled: Row = logits - largest
    with np.errstate(over="ignore"):  # a tiny temperature gives -inf for all but the largest, as intended
        scaled *= factor
    return scaled


def _block_sums(weights: Row) -> npt.NDArray[np.float32]:
    """Return sums of blocks of at most ``_BLOCK`` strided weights, so that the additions vectorize."""
    blocks = -(-len(weights) // _BLOCK)
    full = len(weights) // blocks * blocks
    sums: npt.NDArray[np.float32] = weights[:full].reshape(-1, blocks).sum(axis=0)
    sums[: len(weights) - full] += weights[full:]
    return sums


def _mass(weights: Row) -> float:
    return float(_block_sums(weights).sum(dtype=np.float64))


def _products_mass(left: Row, right: Row) -> float:
    """Return the dot product of two rows, computed in blocks so that rounding errors stay small."""
    blocks = max(1, len(left) // _PRODUCTS)
    full = len(left) // blocks * blocks
    parts = left[:full].reshape(blocks, 1, -1) @ right[:full].reshape(blocks, -1, 1)
    return float(parts.sum(dtype=np.float64)) + float(left[full:] @ right[full:])


def _inverse(weights: npt.NDArray[_F], target: float) -> int:
    """Return the first index at which the cumulative sum exceeds ``target``; its weight is never 0."""
    return _place(np.cumsum(weights, dtype=np.float64), target)


def _place(cumulative: npt.NDArray[np.float64], target: float) -> int:
    place = int(cumulative.searchsorted(target, side="right"))
    return place if place < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def _outweigh(weights: Row, which: Callable[[slice], npt.NDArray[np.bool_]], bound: float) -> bool:
    """Whether the selected tokens surely weigh more than ``bound``; False if that is not certain.

    The row is read in parts and the search ends early, which decides most tokens.
    """
    mass, size = 0.0, -(-len(weights) // _PARTS)
    for start in range(0, len(weights), size):
        part = slice(start, start + size)
        mass += _products_mass(weights[part], which(part).astype(np.float32))
        if mass * _SURELY > bound:
            return True
    return False
