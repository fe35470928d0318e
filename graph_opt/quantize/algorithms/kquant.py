"""K-quant: fit scale and minimum of a block together, with larger weights for larger values; no calibration.

After ggml's ``make_qkx2_quants`` (https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c). Several
ranges are tried; for the levels of each, weighted least squares gives the best scale and minimum. ggml
stores both in 6 bits within super-blocks of 256. Standard DequantizeLinear has a float scale and an integer
zero point per block instead. So the minimum is rounded to a zero point, and the scale is fitted again.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized, full_range, levels_of, reciprocal, scales_by_panel

_STEPS = tuple(-1.0 + 0.2 * step for step in range(26))  # levels added to the width of the range


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
        weighted = levels * importance
        scale = (panel * weighted).sum(1, keepdims=True) * reciprocal(
            (levels * weighted).sum(1, keepdims=True)
        )
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
