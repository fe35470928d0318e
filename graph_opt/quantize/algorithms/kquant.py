"""K-quant: fit scale and minimum of a block together, with larger weights for larger values; no calibration.

After ggml's ``make_qkx2_quants`` (https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c). Several
ranges are tried; for the levels of each, weighted least squares gives the best scale and minimum. ggml
stores both in 6 bits within super-blocks of 256. Standard DequantizeLinear has a float scale and an integer
zero point per block instead. So the minimum is rounded to a zero point, and the scale is fitted again.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized, full_range, levels_of
from .panels import Rounding, inner, quotient, reciprocal, scales_by_panel

STEPS = tuple(-1.0 + 0.3 * step for step in range(17))  # levels added to the width of the range
_FLAT = 1e-3  # variance of levels, relative to their mean square, below which rounding errors dominate it


def quantize(weight: Floats, form: BlockFormat) -> Quantized:
    """Quantize a matrix [in, out].

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    scales, zero_points = scales_by_panel(weight, form, lambda panel, _: _fit(panel, form))
    return levels_of(weight, form, scales, zero_points)


def _fit(panel: Floats, form: BlockFormat) -> tuple[Floats, Floats]:
    """Return scales and zero points [blocks, 1, columns] of a panel [blocks, block_size, columns]."""
    start, zero = full_range(panel, form)
    importance = np.abs(panel)
    importance += np.sqrt(inner(panel, panel) / np.float32(form.block_size))
    importance *= reciprocal(importance.sum(1, keepdims=True))
    rounding, value = Rounding(panel, form, importance), inner(panel, importance)
    span = form.high if not form.symmetric else -form.low
    product, square = rounding.products(start, zero)
    scale, zero_point = quotient(product, square), zero
    gain = scale * product
    for step in STEPS:
        levels, weighted = rounding.weighted(start * np.float32(span / (span + step)), zero)
        product, square = inner(panel, weighted), inner(levels, weighted)
        moved = zero
        if not form.symmetric:
            level = weighted.sum(1, keepdims=True)
            moved = np.clip(zero + _crossing(level, value, product, square), form.low, form.high)
            move = moved - zero
            product, square = product - move * value, square + move * (move - 2 * level)
        fitted = product * reciprocal(square)
        better = (fitted != 0) & (fitted * product > gain)
        gain = np.where(better, fitted * product, gain)
        scale, zero_point = np.where(better, fitted, scale), np.where(better, moved, zero_point)
    return quotient(*rounding.products(scale, zero_point)), zero_point


def _crossing(level: Floats, value: Floats, product: Floats, square: Floats) -> Floats:
    """Return the rounded level where the weighted least-squares line through levels and weights is 0.

    Args:
        level: mean level of each block, [blocks, 1, columns].
        value: mean weight.
        product: mean product of level and weight.
        square: mean square of the levels.
    """
    spread = square - level * level
    slope = (product - level * value) * reciprocal(spread)
    return np.where(spread > _FLAT * square, np.rint(level - value * reciprocal(slope)), np.float32(0))
