"""A fixed orthogonal matrix with a fast product, which spreads single large channels over all channels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
_LARGEST_FACTOR = 64  # a product costs the sum of the factors' sizes per element
_ROWS = 4096  # rows rotated at a time, which bounds the memory of the doubles


class Rotation:
    """The orthogonal matrix R = diag(signs) (F1 x F2 x ...), x is the Kronecker product, of any size.

    The factors are Hadamard matrices of up to 64 for the power of two in ``size``, and the orthonormal cosine
    transform (DCT-II) for its odd part. Every entry has nearly the same magnitude, so the channels of a
    rotated vector have nearly the same range. The signs are pseudo-random, and the same for every call.

    S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    https://arxiv.org/abs/2404.00456.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        power = size & -size
        self.factors = [_cosines(size // power)] if size > power else []
        while power > 1:
            self.factors.append(_hadamard(min(power, _LARGEST_FACTOR)))
            power //= len(self.factors[-1])
        self.signs: Doubles = np.random.RandomState(size).choice((-1.0, 1.0), size)  # a frozen stream

    def after(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Return ``matrix @ R`` for a matrix [rows, size], computed in float64."""
        result = np.empty(matrix.shape, np.float32)
        for start in range(0, len(matrix), _ROWS):
            rows = slice(start, start + _ROWS)
            result[rows] = self.rotated(matrix[rows])
        return result

    def before(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Return ``R.T @ matrix`` for a matrix [size, columns], computed in float64."""
        return np.ascontiguousarray(self.after(matrix.T).T)

    def rotated(self, rows: npt.NDArray[np.floating]) -> Doubles:
        """Return ``rows @ R`` in float64."""
        turned: Doubles = rows.astype(np.float64) * self.signs
        turned = turned.reshape(len(rows), *map(len, self.factors))
        for axis, factor in enumerate(self.factors, start=1):
            turned = np.moveaxis(np.moveaxis(turned, axis, -1) @ factor, -1, axis)
        return turned.reshape(rows.shape)


def _hadamard(size: int) -> Doubles:
    """Return Sylvester's Hadamard matrix of a power of two, scaled to be orthogonal."""
    matrix: Doubles = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def _cosines(size: int) -> Doubles:
    """Return the orthonormal DCT-II of ``size`` points."""
    place = np.arange(size)
    matrix: Doubles = np.cos(np.pi * (2 * place[:, None] + 1) * place / (2 * size)) * math.sqrt(2 / size)
    matrix[:, 0] = math.sqrt(1 / size)
    return matrix
