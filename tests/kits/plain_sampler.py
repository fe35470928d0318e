"""The reference of sampling: everything sorted, filtered in the documented order, added up in float64.

All fast paths of ``runtime/engine/sampling`` are compared with it. It follows the order
of the fields of ``Filters``: temperature, then Mirostat alone, or top-k, top-p, min-p, typical-p and XTC.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from carryall.runtime.engine.sampling.filters import Filters
from carryall.runtime.engine.sampling.whole_rows import WholeRow

Logits = npt.NDArray[np.float32]
ROUNDING = 1e-5  # closer decisions may fall either way


@dataclass(frozen=True)
class Kept:
    """What the filters leave of one row.

    Args:
        tokens: most likely first; equal ones in order of token id.
        weights: in proportion to probability.
        margin: how far the closest decision was from the other outcome; below ``ROUNDING`` either may come.
    """

    tokens: list[int]
    weights: list[float]
    margin: float

    def shares(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """The probability of each token [vocab_size]."""
        shares = np.zeros(vocab_size)
        shares[self.tokens] = np.array(self.weights) / math.fsum(self.weights)
        return shares

    def draw(self, uniform: float) -> tuple[int, float]:
        """Walk the cumulative sum; return the token, and how close the closest decision was."""
        total = math.fsum(self.weights)
        target, mass, margin = uniform * total, 0.0, self.margin
        for token, weight in zip(self.tokens, self.weights, strict=True):
            mass += weight
            margin = min(margin, abs(mass - target) / total)
            if mass > target:
                return token, margin
        return self.tokens[-1], 0.0


def most_likely(logits: Logits) -> int:
    """The lowest of the most likely tokens."""
    return max(range(len(logits)), key=lambda token: (logits[token], -token))


def keep(logits: Logits, filters: Filters) -> Kept:
    """Apply the filters to logits [vocab_size], the largest of them finite."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    largest = float(logits[order[0]])
    weights = [math.exp((float(logits[token]) - largest) / filters.temperature) for token in order]
    margins = [1.0]
    if filters.max_surprise < math.inf:
        bits = _surprises(weights)
        bound = max(filters.max_surprise, bits[0])  # the most likely ones stay
        margins += [abs(own - bound) for own in bits if bits[0] < own < math.inf]
        kept = sum(own <= bound for own in bits)
        return Kept(order[:kept], weights[:kept], min(margins))
    if filters.top_k:
        order, weights = order[: filters.top_k], weights[: filters.top_k]
    if filters.top_p < 1:
        total, kept, mass = math.fsum(weights), 0, 0.0
        while kept < len(weights) and mass < filters.top_p * total:
            mass += weights[kept]
            kept += 1
            margins.append(abs(mass - filters.top_p * total) / total)
        order, weights = order[:kept], weights[:kept]
    if filters.min_p > 0:
        margins += [abs(weight - filters.min_p) for weight in weights if weight < 1]
        kept = sum(weight >= filters.min_p for weight in weights)
        order, weights = order[:kept], weights[:kept]
    if filters.typical_p < 1:
        places, closest = _typical(weights, filters.typical_p)
        order, weights = [order[i] for i in places], [weights[i] for i in places]
        margins.append(closest)
    if filters.xtc_threshold < 1:
        total = math.fsum(weights)
        margins += [abs(weight / total - filters.xtc_threshold) for weight in weights]
        dropped = max(0, sum(weight >= filters.xtc_threshold * total for weight in weights) - 1)
        order, weights = order[dropped:], weights[dropped:]
    return Kept(order, weights, min(margins))


def _surprises(weights: Sequence[float]) -> list[float]:
    """In bits."""
    total = math.fsum(weights)
    return [-math.log2(weight / total) if weight else math.inf for weight in weights]


def _typical(weights: Sequence[float], mass: float) -> tuple[list[int], float]:
    """The places of those closest to the entropy until they reach ``mass``, and how close the calls were."""
    total, bits = math.fsum(weights), _surprises(weights)
    entropy = math.fsum(w / total * s for w, s in zip(weights, bits, strict=True) if w)
    distance = [abs(own - entropy) for own in bits]
    kept, reached, margins = list[int](), 0.0, [1.0]
    ranked = sorted(range(len(weights)), key=lambda place: (distance[place], place))
    for rank, place in enumerate(ranked):
        if reached >= mass:
            margins.append(distance[place] - distance[ranked[rank - 1]] or 1.0)
            break
        kept.append(place)
        reached += weights[place] / total
        margins.append(abs(reached - mass))
    return sorted(kept), min(margins)


@contextlib.contextmanager
def whole_rows_used() -> Iterator[list[Filters]]:
    """The filters of which a draw was made from a whole row: it has another order of tokens."""
    used: list[Filters] = []
    draw = WholeRow.draw

    def spy(row: WholeRow, filters: Filters, *share: Any) -> int:
        used.append(filters)
        return draw(row, filters, *share)

    with mock.patch.object(WholeRow, "draw", spy):
        yield used
