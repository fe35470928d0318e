"""GPTQ: round weights one input at a time, and compensate each error in the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen first, for the least error weighted by the inputs' mean
squares. Then inputs are processed in order of decreasing importance. Errors of earlier quantized layers are
compensated as in Y. Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration",
https://arxiv.org/abs/2504.02692. At the end, ``refine`` improves scales and levels.
"""

from __future__ import annotations

import numpy as np

from .blockwise import BlockFormat, Floats, Quantized
from .grouped import Scales, refitted, starting_scales
from .refine import descend

_DAMPING = 0.02  # share of the mean of the diagonal of the moments that is added to the diagonal
_COLUMNS = 1024  # columns rounded at a time
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
    correction = None if drift is None else np.linalg.solve(damped, drift)
    order = np.argsort(-importance, kind="stable")
    factor = _inverse_factor(damped[np.ix_(order, order)])
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)
    parts: list[tuple[Floats, Floats]] = []
    for start in range(0, weight.shape[1], _COLUMNS):  # columns are independent
        columns = slice(start, start + _COLUMNS)
        target = np.array(weight[:, columns], np.float32)
        if correction is not None:
            target += correction @ target
        block_scales = starting_scales(target, form, importance)
        levels = np.empty_like(target)
        blocks = order // form.block_size
        levels[order] = _round(
            target[order], block_scales.scales[blocks], block_scales.zero_points[blocks], factor, form
        )
        block_scales = _refine(target, levels, block_scales, damped, form)
        values[:, columns] = levels
        parts.append((block_scales.scales, block_scales.zero_points))
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
    """Return the upper Cholesky factor U of the inverse of the moments H: H^-1 = U^T U."""
    upper: Floats = np.linalg.cholesky(np.linalg.inv(moments.astype(np.float64))).T.astype(np.float32)
    return upper
