"""GPTQ: round weights one input at a time, and compensate each error in the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen first, for the least error weighted by the inputs' mean
squares. Then inputs are processed in order of decreasing importance. Errors of earlier quantized layers are
compensated as in Y. Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration",
https://arxiv.org/abs/2504.02692. At the end, ``refine`` improves scales and levels.
"""

from __future__ import annotations

import numpy as np

from ...graph.lazy import Array
from .blockwise import BlockFormat, Floats, Quantized
from .grouped import Scales, refitted, starting_scales
from .refine import descend

_DAMPING = 0.02  # share of the mean of the diagonal of the moments that is added to the diagonal
_COLUMNS = 1024  # columns rounded at a time
_DIRECT = 64  # rows of a triangular matrix that is inverted as any other
_PANEL = 128  # inputs whose errors are propagated to later inputs at once
_ROUNDS = 2  # rounds of refinement; more have nearly no effect


def quantize(weight: Floats, form: BlockFormat, moments: Floats, drift: Floats | None = None) -> Quantized:
    """Quantize a matrix [in, out] so that its products with calibration inputs change least.

    Args:
        weight: the matrix.
        form: its storage format.
        moments: E[y y^T] of its inputs y in the quantized model, [in, in].
        drift: E[y (x - y)^T], where x are the inputs in the float model; None if x = y.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    importance = np.diagonal(moments).copy()
    damped = moments + np.float32(max(_DAMPING * importance.mean(), 1e-12)) * np.eye(
        len(moments), dtype=np.float32
    )
    order = np.argsort(-importance, kind="stable")
    factor = _inverse_factor(damped[np.ix_(order, order)])
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)
    blocks = order // form.block_size

    def solve(columns: slice) -> tuple[Floats, Floats]:  # which are independent of the others
        target = np.array(weight[:, columns], np.float32)
        if drift is not None:
            target[order] += factor.T @ (factor @ (drift @ target)[order])
        block_scales = starting_scales(target, form, importance)
        levels = np.empty_like(target)
        levels[order] = _round(
            target[order], block_scales.scales[blocks], block_scales.zero_points[blocks], factor, form
        )
        block_scales = _refine(target, levels, block_scales, damped, form)
        values[:, columns] = levels
        return block_scales.scales, block_scales.zero_points

    starts = range(0, weight.shape[1], _COLUMNS)
    parts = [solve(slice(start, start + _COLUMNS)) for start in starts]
    scales, zero_points = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def _refine(target: Floats, levels: Floats, scales: Scales, moments: Floats, form: BlockFormat) -> Scales:
    """Improve ``levels`` in place and return better scales."""
    zero = np.repeat(scales.zero_points, form.block_size, 0)
    for _ in range(_ROUNDS):
        scales = refitted(target, levels - zero, scales, moments, form)
        descend(target, levels, np.repeat(scales.scales, form.block_size, 0), zero, moments, form)
    return refitted(target, levels - zero, scales, moments, form)


def _round(left: Floats, scale: Floats, zero: Floats, factor: Floats, form: BlockFormat) -> Floats:
    """Return the levels of the rows of ``left``, which is overwritten; ``scale`` and ``zero`` are per row."""
    levels = np.empty_like(left)
    reciprocal = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    for begin in range(0, len(left), _PANEL):
        end = min(begin + _PANEL, len(left))
        errors = np.empty((end - begin, left.shape[1]), np.float32)
        for i in range(begin, end):
            levels[i] = np.clip(np.rint(left[i] * reciprocal[i]) + zero[i], form.low, form.high)
            errors[i - begin] = (left[i] - (levels[i] - zero[i]) * scale[i]) / factor[i, i]
            left[i + 1 : end] -= factor[i, i + 1 : end, None] * errors[i - begin]
        left[end:] -= factor[begin:end, end:].T @ errors
    return levels


def _inverse_factor(moments: Floats) -> Floats:
    """Return the upper Cholesky factor U of the inverse of the moments H: H^-1 = U^T U.

    The factor L of H with its rows and columns in reverse order gives U: the inverse of L, reversed again.
    """
    lower = np.linalg.cholesky(moments[::-1, ::-1].astype(np.float64))
    upper: Floats = _inverse_of_lower(lower)[::-1, ::-1].astype(np.float32)
    return upper


def _inverse_of_lower(matrix: Array) -> Array:
    """Return the inverse of a lower triangular matrix, by its quarters."""
    if len(matrix) <= _DIRECT:
        return np.tril(np.linalg.inv(matrix))
    half = len(matrix) // 2
    inverse = np.zeros_like(matrix)
    inverse[:half, :half] = first = _inverse_of_lower(matrix[:half, :half])
    inverse[half:, half:] = second = _inverse_of_lower(matrix[half:, half:])
    inverse[half:, :half] = -second @ (matrix[half:, :half] @ first)
    return inverse
