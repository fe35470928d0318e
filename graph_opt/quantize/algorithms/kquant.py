"""K-quant style: scale and minimum of a block fitted together, large weights counting more; no calibration.

After ggml's ``make_qkx2_quants`` (https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c): a row of
ranges is tried; for the levels that each gives, weighted least squares finds the best scale and minimum. ggml
then stores these in 6 bits a super-block of 256; standard DequantizeLinear has a float scale and an integer
zero point a block, so the minimum becomes a zero point, and the scale is fitted once more to what that
leaves.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized, full_range, levels_of, reciprocal, scales_by_panel

_STEPS = tuple(-1.0 + 0.2 * step for step in range(26))  # levels that a tried range is wider by


def quantize(weight: Floats, form: BlockFormat) -> Quantized:
    """Quantize a matrix [in, out].

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    scales, zero_points = scales_by_panel(weight, form, lambda panel: _fit(panel, form))
    return levels_of(weight, form, scales, zero_points)


def _fit(panel: Floats, form: BlockFormat) -> tuple[Floats, Floats]:
    """Return scales and zero points [blocks, 1, columns] of a panel [blocks, block_size, columns]."""
    start, zero = full_range(panel, form)
    importance = np.sqrt(np.square(panel).mean(1, keepdims=True)) + np.abs(panel)
    span = form.high if not form.symmetric else -form.low
    best_scale, best_zero = start, zero
    least = np.full_like(start, np.inf)
    for step in _STEPS:
        tried = start * np.float32(span / (span + step))
        levels = np.clip(np.rint(panel * reciprocal(tried)) + zero, form.low, form.high)
        moved = zero if form.symmetric else _zero_point(panel, levels, importance, form)
        levels -= moved
        weighed = levels * importance
        scale = (panel * weighed).sum(1, keepdims=True) * reciprocal((levels * weighed).sum(1, keepdims=True))
        error = (importance * np.square(panel - _nearest(panel, scale, moved, form))).sum(1, keepdims=True)
        better = (error < least) & (scale != 0)
        least = np.where(better, error, least)
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, moved, best_zero)
    return best_scale, best_zero


def _zero_point(panel: Floats, levels: Floats, importance: Floats, form: BlockFormat) -> Floats:
    """Return the rounded zero point of the weighted least-squares line through levels and weights."""
    share = importance * reciprocal(importance.sum(1, keepdims=True))
    level = (share * levels).sum(1, keepdims=True)
    value = (share * panel).sum(1, keepdims=True)
    slope = (share * (levels - level) * (panel - value)).sum(1, keepdims=True)
    slope *= reciprocal((share * np.square(levels - level)).sum(1, keepdims=True))
    result: Floats = np.clip(np.rint(level - value * reciprocal(slope)), form.low, form.high)
    return result


def _nearest(panel: Floats, scale: Floats, zero: Floats, form: BlockFormat) -> Floats:
    result: Floats = np.clip(np.rint(panel * reciprocal(scale)) + zero, form.low, form.high)
    result -= zero
    result *= scale
    return result
