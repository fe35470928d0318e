"""Draws from rows of logits that are not worth sorting: whole vocabularies, a few passes each.

Where it cannot be told at once which tokens a filter keeps, a token is drawn from all, and again until it is
one that is kept: exact, since whether one token is kept takes a single look at the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .splitmix import uniform

_BLOCK = 256

Row = npt.NDArray[np.float32]  # [vocab_size]
_F = TypeVar("_F", np.float32, np.float64)


def scaled_logits(row: Row, temperature: float, largest: np.float32) -> Row:
    """Logits over temperature, less the largest; a row of this size is best worked on alone, in cache."""
    scaled: Row = row - largest
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            scaled /= np.float32(temperature)
    return scaled


def row_weights(row: Row, temperature: float, largest: np.float32) -> Row:
    """Weights that are in proportion to probability, the largest 1."""
    weights = scaled_logits(row, temperature, largest)
    np.exp(weights, out=weights)
    return weights


def block_sums(weights: Row) -> npt.NDArray[np.float32]:
    """Sums of blocks of at most ``_BLOCK`` weights that lie far apart, so that whole vectors are added."""
    blocks = -(-len(weights) // _BLOCK)
    full = len(weights) // blocks * blocks
    sums: npt.NDArray[np.float32] = weights[:full].reshape(-1, blocks).sum(axis=0)
    sums[: len(weights) - full] += weights[full:]
    return sums


def mass(weights: Row) -> float:
    """The sum of a row."""
    return float(block_sums(weights).sum(dtype=np.float64))


def products_mass(left: Row, right: Row) -> float:
    """The sum of the products of two rows, taken in blocks so that rounding errors stay small."""
    blocks = max(1, len(left) // _BLOCK)
    full = len(left) // blocks * blocks
    parts = left[:full].reshape(blocks, 1, -1) @ right[:full].reshape(blocks, -1, 1)
    return float(parts.sum(dtype=np.float64)) + float(left[full:] @ right[full:])


class Cumulative:
    """Inverse of a cumulative distribution in two levels: find the block, then the token in it."""

    def __init__(self, weights: Row) -> None:
        self.weights = weights
        self._sums = block_sums(weights).astype(np.float64)
        self._mass = np.cumsum(self._sums)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._mass[-1])

    def token(self, share: float) -> int:
        """The token at this share of the mass."""
        target = share * self._mass[-1]
        block = min(int((self._mass <= target).sum()), int(np.searchsorted(self._mass, self._mass[-1])))
        inside = self.weights[block :: len(self._sums)]
        place = inverse(inside, target - (self._mass[block] - self._sums[block]))
        return block + place * len(self._sums)

    def first_kept(self, share: float, is_kept: Callable[[int], bool]) -> int:
        """Draw until a token is kept: with ``share`` first, then with numbers that follow from it."""
        key = int(share * 2**53)
        for place in itertools.count():
            token = self.token(uniform(key, place) if place else share)
            if is_kept(token):
                return token
        raise AssertionError("unreachable")


def inverse(weights: npt.NDArray[_F], target: float) -> int:
    """The first index at which the cumulative sum exceeds ``target``; never one without weight."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, target, side="right")), last)


def exclude_top(weights: npt.NDArray[_F], bound: float) -> None:
    """Of one row's weights that reach ``bound``, leave only the least; of equal ones the last.

    XTC, by its author's definition: https://github.com/oobabooga/text-generation-webui/pull/6335.
    """
    if bound > 1.0:  # no weight is above 1
        return
    top = np.flatnonzero(weights >= bound)
    if len(top) > 1:
        last = len(top) - 1 - int(np.argmin(weights[top][::-1]))
        weights[np.delete(top, last)] = 0.0


def draw_any(weights: Row, min_p: float, xtc_threshold: float, share: float) -> int:
    """Draw from all tokens that min-p and XTC leave; ``weights`` are used up."""
    if min_p > 0.0:
        weights *= weights >= min_p
    if xtc_threshold < 1.0:
        exclude_top(weights, xtc_threshold * mass(weights))
    return Cumulative(weights).token(share)


def draw_nucleus(
    cumulative: Cumulative, nucleus: float, min_p: float, xtc_threshold: float, share: float
) -> int:
    """Draw from the likeliest tokens that together have the mass ``nucleus``."""
    weights = cumulative.weights
    if min_p > 0.0 or xtc_threshold < 1.0:
        left = weights * (weights >= min_p)
        if xtc_threshold < 1.0:  # a nucleus of thousands of tokens has the mass asked for, and no more
            exclude_top(left, xtc_threshold * nucleus)
        cumulative = Cumulative(left)

    def is_kept(token: int) -> bool:
        weight = weights[token]
        before = products_mass(weights, (weights > weight).astype(np.float32))
        before += float(weight) * np.count_nonzero(weights[:token] == weight)
        return bool(before < nucleus)

    return cumulative.first_kept(share, is_kept)


def draw_typical(scaled: Row, typical_p: float, share: float) -> int:
    """Draw from the tokens whose surprise is closest to the entropy (arXiv:2202.00666).

    Surprise is log(total) - scaled, and entropy its mean, so that their distance is that of the scaled logit
    from its own mean.
    """
    weights = np.exp(scaled)
    cumulative = Cumulative(weights)
    with np.errstate(invalid="ignore"):
        moment = products_mass(weights, scaled)
    if np.isnan(moment):  # what has no weight adds nothing
        moment = products_mass(weights, np.maximum(scaled, np.finfo(np.float32).min))
    mean = moment / cumulative.total

    def is_kept(token: int) -> bool:
        own = scaled[token]
        mirrored = np.float32(2.0 * mean - float(own))
        closer = (scaled > min(own, mirrored)) & (scaled < max(own, mirrored))
        before = products_mass(weights, closer.astype(np.float32))
        before += float(weights[token]) * np.count_nonzero(scaled[:token] == own)
        return bool(before < typical_p * cumulative.total)

    return cumulative.first_kept(share, is_kept)


def draw_unsurprising(weights: Row, bits: float, share: float) -> tuple[int, float]:
    """Draw from the tokens of at most so many bits of surprise; also that of the token drawn."""
    total = mass(weights)
    kept = weights * (weights >= min(total * 2.0**-bits, 1.0))  # the heaviest weighs 1, and stays
    token = Cumulative(kept).token(share)
    return token, float(np.log2(total) - np.log2(weights[token]))
