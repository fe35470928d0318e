"""What calibrated algorithms know of the inputs of products, computed once for all weights that read them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...graph.lazy import Array
from .blockwise import Floats
from .cores import on_all_cores

_DAMPING = 0.02  # share of the mean of the diagonal of the moments that is added to the diagonal
_DIRECT = 64  # rows of a matrix that is factored and inverted directly
_LARGE = 1 << 18  # values of a factor, from which a product is shared by all cores
_COLUMNS = 256  # of such a product that one core computes at a time


class Inputs:
    """Moments of the inputs y of products.

    Args:
        moments: E[y y^T], [in, in].

    Attributes:
        importance: mean squares, [in].
    """

    def __init__(self, moments: Floats) -> None:
        self.moments = moments
        self.importance: Floats = np.diagonal(moments).copy()

    def scaled(self, scale: Floats) -> Inputs:
        """Return the moments of inputs that are divided by ``scale``, [in]."""
        squares: Floats = np.outer(scale, scale).astype(np.float32)
        return Inputs(self.moments / squares)

    @cached_property
    def damped(self) -> Floats:
        """The moments with a larger diagonal, which can be inverted."""
        added = np.float32(max(_DAMPING * self.importance.mean(), 1e-12))
        result = self.moments.copy()
        np.einsum("ii->i", result)[:] += added
        return result

    @cached_property
    def order(self) -> Array:
        """The inputs by decreasing importance, int64 [in]."""
        return np.argsort(-self.importance, kind="stable")

    @cached_property
    def factor(self) -> Floats:
        """The upper Cholesky factor U of the inverse of the damped moments H in this order: H^-1 = U^T U.

        The factor L of H with rows and columns in reverse order gives U: the inverse of L, reversed again.
        float32 suffices: the damping is far above the rounding of the largest eigenvalue.
        """
        reverse = self.order[::-1]
        inverse = _inverse_factor(self.damped[np.ix_(reverse, reverse)])
        return np.ascontiguousarray(inverse[::-1, ::-1], np.float32)


def _inverse_factor(matrix: Floats) -> Floats:
    """Return the inverse of the lower Cholesky factor of a matrix, by its quarters.

    All work is in products, on all cores: 4,096 inputs take 1.6 s of one core, 2.6 s with LAPACK's factor.
    """
    if len(matrix) <= _DIRECT:
        small: Floats = np.tril(np.linalg.inv(np.linalg.cholesky(matrix)))
        return small
    half = len(matrix) // 2
    inverse = np.zeros_like(matrix)
    inverse[:half, :half] = first = _inverse_factor(matrix[:half, :half])
    across = _product(matrix[half:, :half], first.T)
    inverse[half:, half:] = second = _inverse_factor(matrix[half:, half:] - _product(across, across.T))
    inverse[half:, :half] = -_product(second, _product(across, first))
    return inverse


def _product(left: Floats, right: Floats) -> Floats:
    """Return left @ right, by all cores if it is large."""
    width = right.shape[1] if left.size < _LARGE else _COLUMNS
    columns = [slice(start, start + width) for start in range(0, right.shape[1], width)]
    return np.concatenate(on_all_cores(lambda part: left @ right[:, part], columns), axis=1)
