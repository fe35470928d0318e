"""HQQ: zero points that minimise the p-norm of the error with p < 1, without calibration.

H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models",
https://mobiusml.github.io/hqq_blog/. Such a norm tolerates a few large errors. Two steps alternate: a
shrinkage operator selects the part of the error to accept, and the best zero point for the rest has a closed
form. Different from the source, the scale is refitted too. Each block keeps the parameters with the least
error.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized, least_squares, levels_of
from .panels import reciprocal, scales_by_panel

_NORM = 0.7
_BETA, _GROWTH = 10.0, 1.01  # penalty and its growth per round, as published
_ROUNDS = 20


def quantize(weight: Floats, form: BlockFormat) -> Quantized:
    """Quantize a matrix [in, out].

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    scales, zero_points = scales_by_panel(weight, form, lambda panel, _: _optimise(panel, form))
    return levels_of(weight, form, scales, zero_points)


def _optimise(panel: Floats, form: BlockFormat) -> tuple[Floats, Floats]:
    """Return scales and zero points [blocks, 1, columns] of a panel [blocks, block_size, columns]."""
    scale, zero = least_squares(panel, form)
    # Errors are scaled to those of weights with a standard deviation of 0.02.
    unit = 0.02 / np.maximum(np.sqrt(np.square(panel).mean(1, keepdims=True)), 1e-30)
    best_scale, best_zero = scale, zero
    least = np.full_like(scale, np.inf)
    beta = _BETA
    for _ in range(_ROUNDS):
        levels = np.clip(np.rint(panel * reciprocal(scale)) + zero, form.low, form.high)
        error = (panel - (levels - zero) * scale) * unit
        size = np.abs(error)
        norm = (np.maximum(size, 1e-8) ** _NORM).sum(1, keepdims=True)
        better = norm < least
        least = np.where(better, norm, least)
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        accepted = np.sign(error) * np.maximum(size - np.maximum(size, 1e-8) ** (_NORM - 1) / beta, 0) / unit
        aim = panel - accepted
        if not form.symmetric:
            offset = (levels - aim * reciprocal(scale)).mean(1, keepdims=True)
            zero = np.clip(np.rint(offset), form.low, form.high)
        levels -= zero
        scale = (aim * levels).sum(1, keepdims=True) * reciprocal(np.square(levels).sum(1, keepdims=True))
        beta *= _GROWTH
    return best_scale.astype(np.float32), best_zero.astype(np.float32)
