"""Find by evaluation which gated activation some nodes compute of gate and up in one array."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..analysis.region import close
from ..graph.lazy import Array
from .mixture import Activation

Rows = tuple[slice, slice]  # the columns of gate and of up, which are rows of the weights [out, in]
_FIRST = 16  # columns on which all candidates are tried; the one that fits is tried on the others


def gated_activation(
    compute: Callable[[Array], Array], tokens: int, width: int, numbers: Sequence[float]
) -> tuple[Activation, Rows] | None:
    """Return the activation that ``compute`` is, and the columns of gate and up; None if it is none.

    Args:
        compute: returns [tokens, width / 2] for [tokens, width].
        tokens: number of tokens that ``compute`` takes.
        width: columns of gate and up together.
        numbers: candidates of alpha, beta and limit, such as the constants of the nodes.
    """
    factors = {abs(number) for number in numbers if number and math.isfinite(number)}
    sizes = np.array([1.0, *sorted(3 * number for number in factors)])  # beyond every limit
    if len(sizes) > tokens:
        return None
    rng = np.random.default_rng(width)
    hidden = rng.standard_normal((tokens, width)) * sizes[np.arange(tokens) % len(sizes), None]
    hidden = hidden.astype(np.float32)
    activation = compute(hidden)
    if activation.shape != (tokens, width // 2):
        return None
    for rows in _halves(width):
        gate, up = (hidden[:, each] for each in rows)
        few = slice(len(sizes)), slice(_FIRST)
        for candidate in _candidates(sorted(factors), numbers):
            if _equal(activation[few], _gated(candidate, gate[few], up[few])):
                return (candidate, rows) if _equal(activation, _gated(candidate, gate, up)) else None
    return None


def _halves(size: int) -> tuple[Rows, Rows]:
    """Return the possible columns of gate and up: two halves, or interleaved."""
    half = size // 2
    return (slice(half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))


def _candidates(sizes: Sequence[float], numbers: Sequence[float]) -> Iterator[Activation]:
    for limit in (math.inf, *sizes):
        for alpha in dict.fromkeys((1.0, *sizes)):
            for beta in dict.fromkeys((0.0, *numbers)):
                yield Activation(alpha=alpha, beta=beta, limit=limit)


def _gated(activation: Activation, gate: Array, up: Array) -> Array:
    limit = activation.limit
    gate, up = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-activation.alpha * gate))
    return np.asarray(silu * (up + activation.beta))


def _equal(found: Array, expected: Array) -> bool:
    """Return whether each row is equal up to rounding, since rows differ in magnitude."""
    return all(close(*pair) for pair in zip(found, expected, strict=True))
