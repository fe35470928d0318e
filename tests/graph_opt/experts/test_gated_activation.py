"""Gated activations are recognised by their values, with their constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from carryall.graph_opt.experts.gated_activation import gated_activation
from carryall.graph_opt.experts.mixture import Activation

Floats = npt.NDArray[np.float32]
TOKENS, WIDTH = 12, 10
HALVES, TURNS = (slice(5), slice(5, None)), (slice(0, None, 2), slice(1, None, 2))


def function(
    rows: tuple[slice, slice], alpha: float, beta: float, limit: float
) -> Callable[[Floats], Floats]:
    def compute(hidden: Floats) -> Floats:
        gate, up = (hidden[:, each] for each in rows)
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, -limit, limit)
        with np.errstate(over="ignore"):
            return np.asarray(gate / (1 + np.exp(-np.float32(alpha) * gate)) * (up + beta), np.float32)

    return compute


@pytest.mark.parametrize("rows", [HALVES, TURNS])
@pytest.mark.parametrize(
    ("alpha", "beta", "limit"),
    [(1, 0, math.inf), (1.702, 1, 7), (1.702, 0, 0.5), (1, 1, 300), (1, -2, math.inf)],
)
def test_the_constants_are_found(rows: tuple[slice, slice], alpha: float, beta: float, limit: float) -> None:
    numbers = [number for number in (alpha, beta, limit, -limit) if math.isfinite(number)]
    found = gated_activation(function(rows, alpha, beta, limit), TOKENS, WIDTH, numbers)
    assert found == (Activation(alpha=alpha, beta=beta, limit=limit), rows)


def test_a_limit_that_no_candidate_is_is_found_out() -> None:
    assert gated_activation(function(HALVES, 1, 0, 2.9), TOKENS, WIDTH, [1.0]) is None


def test_columns_that_differ_beyond_the_first_are_found_out() -> None:
    plain = function((slice(40), slice(40, None)), 1, 0, math.inf)

    def compute(hidden: Floats) -> Floats:
        result = plain(hidden)
        result[:, -1] = 0
        return result

    assert gated_activation(compute, TOKENS, 80, []) is None


def test_more_constants_than_tokens_are_not_tried() -> None:
    assert gated_activation(function(HALVES, 1, 0, math.inf), 3, WIDTH, [1.0, 2.0, 3.0]) is None
