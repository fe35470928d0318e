"""What calibrated algorithms know of the inputs of products, computed once for all weights that read them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...graph.lazy import Array
from .blockwise import Floats
from .cores import on_all_cores
from .sweep import panels

_DAMPING = 0.02  # share of the mean of the diagonal of the moments that is added to the diagonal
_BLOCK = 512  # columns that are factored at a time


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
    def factor(self) -> Factor:
        """The factor of the damped moments in this order.

        That of the moments in reverse order, reversed again, is upper triangular. float32 suffices: the
        damping is far above the rounding of the largest eigenvalue.
        """
        reverse = self.order[::-1]
        lower = _factored(self.damped[np.ix_(reverse, reverse)])
        return Factor(np.ascontiguousarray(lower[::-1, ::-1]))


class Factor:
    """The factor U of moments H = U D U^T, with D diagonal, and U upper triangular with ones in its diagonal.

    The error e^T H e of a change e is the sum of D (U^T e)^2, and row k of U^T e holds no change behind k.
    So the best change of an input k balances those before it, with which column k of U multiplies them.

    Args:
        upper: the upper triangular matrix whose product with its transpose is H, float32 [in, in];
            overwritten.

    Attributes:
        matrix: U.
    """

    def __init__(self, upper: Floats) -> None:
        upper /= np.diagonal(upper).copy()
        self.matrix = upper

    @cached_property
    def inverses(self) -> list[Floats]:
        """The inverses of U within each panel of inputs."""
        return [np.triu(np.linalg.inv(self.matrix[inputs, inputs])) for inputs in panels(len(self.matrix))]


def _factored(matrix: Floats) -> Floats:
    """Return the lower Cholesky factor of a matrix, which is overwritten.

    All large products are shared by the cores, and one thread computes each.
    """
    for here in panels(len(matrix), _BLOCK):
        behind = slice(here.stop, None)
        matrix[here, here] = corner = np.linalg.cholesky(matrix[here, here])
        matrix[here, behind] = 0
        matrix[behind, here] = below = matrix[behind, here] @ np.linalg.inv(corner).T

        def subtract(columns: slice, below: Floats = below, end: int = here.stop) -> None:
            start = columns.start - end
            matrix[columns.start :, columns] -= below[start:] @ below[start : columns.stop - end].T

        starts = range(here.stop, len(matrix), _BLOCK)
        on_all_cores(subtract, [slice(start, start + _BLOCK) for start in starts])
    return matrix
