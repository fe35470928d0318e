"""GPTQ: weights rounded one input at a time, each error made up for by the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen beforehand, for the least error weighted by how large each
input is; then inputs are worked through by falling importance.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized, Quantizer, choose_scales
from .moments import SecondMoments

_DAMPING = 0.01  # of the mean moment, added to all, as in the paper
_COLUMNS = 1024  # rounded at a time
_PANEL = 128  # inputs whose errors reach the later ones together


def gptq(moments: SecondMoments, name: str) -> Quantizer:
    """Return the quantizer of the weight ``name``."""
    return lambda weight, form: quantize(weight, form, moments.of(name))


def quantize(weight: Floats, form: BlockFormat, moments: Floats) -> Quantized:
    """Quantize a matrix [in, out] so that its products with typical inputs change least.

    Args:
        weight: the matrix.
        form: how it is stored.
        moments: E[x x^T], [in, in].

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    importance = np.diagonal(moments).copy()
    scales, zero_points = choose_scales(weight, form, importance)
    order = np.argsort(-importance, kind="stable")
    factor = _inverse_factor(moments[np.ix_(order, order)])
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)
    for start in range(0, weight.shape[1], _COLUMNS):  # a column does not depend on the others
        columns = slice(start, start + _COLUMNS)
        rows = np.array(weight[order, columns], np.float32)
        blocks = order // form.block_size
        levels = _round(rows, scales[blocks, columns], zero_points[blocks, columns], factor, form)
        values[order, columns] = levels
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def _round(left: Floats, scale: Floats, zero: Floats, factor: Floats, form: BlockFormat) -> Floats:
    """Return the levels of the rows of ``left``, which is used up; scale and zero point are by row, too."""
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
    """Return the upper Cholesky factor U of the damped inverse: H^-1 = U^T U."""
    damped = moments.astype(np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal += max(_DAMPING * float(diagonal.mean()), 1e-12)
    upper: Floats = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return upper
