"""Improve quantized weights by alternating between scales and levels.

With fixed levels, the scales of a column with the least error of calibration products solve a small linear
system. With fixed scales, every level moves to its best value given all others: cyclic coordinate descent,
as in K. Behdin et al., "QuantEase: Optimization-based Quantization for Language Models",
https://arxiv.org/abs/2309.01885. Neither step increases the error.
"""

from __future__ import annotations

import numpy as np

from ...graph.lazy import Array
from .blockwise import BlockFormat, Floats

_PANEL = 128  # inputs whose changes are propagated to the others at once
_SYSTEM_BYTES = 64 << 20  # size of the linear systems solved at a time
_RIDGE = 1e-4  # relative to a block's diagonal entry; blocks without influence keep their scale


def fit_scales(target: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    """Return the scales [blocks, out] with the least squared error of the products, given the levels.

    Args:
        target: the float matrix, [in, out].
        levels: levels minus zero points, [in, out].
        scales: the current scales, [blocks, out].
        moments: E[x x^T], [in, in].
    """
    parts = [
        _fit(target[:, columns], levels[:, columns], scales[:, columns], moments)
        for columns in column_parts(*scales.shape)
    ]
    return np.concatenate(parts, axis=1)


def _fit(target: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    systems, aims = block_systems(target, levels, len(scales), moments)
    diagonal = np.einsum("nbb->nb", systems)
    ridge = _RIDGE * diagonal + max(1e-12 * float(diagonal.mean()), 1e-30)
    diagonal += ridge
    solved = np.linalg.solve(systems, (aims + ridge * scales.T)[..., None])[..., 0]
    result: Floats = np.ascontiguousarray(solved.T, np.float32)
    return result


def column_parts(blocks: int, outputs: int) -> list[slice]:
    """Return slices of columns whose linear systems fit in memory."""
    width = max(1, _SYSTEM_BYTES // (8 * blocks * blocks))
    return [slice(start, start + width) for start in range(0, outputs, width)]


def block_systems(target: Floats, levels: Floats, blocks: int, moments: Floats) -> tuple[Array, Array]:
    """Return A [out, blocks, blocks] and b [out, blocks] of the error s^T A s - 2 b^T s of scales s."""
    outputs = levels.shape[1]
    cut = levels.reshape(blocks, -1, outputs)
    systems = np.empty((outputs, blocks, blocks))
    for index, part in enumerate(cut):
        begin, end = index * len(part), (index + 1) * len(part)
        spread = (moments[:end, begin:end] @ part).reshape(index + 1, *part.shape)
        row = np.einsum("bin,bin->nb", cut[: index + 1], spread)
        systems[:, index, : index + 1] = systems[:, : index + 1, index] = row  # symmetric, as the moments
    return systems, np.einsum("bin,bin->nb", cut, (moments @ target).reshape(cut.shape))


def descend(
    target: Floats, levels: Floats, scale: Floats, zero: Floats, moments: Floats, form: BlockFormat
) -> int:
    """Move each level of ``levels`` to its best value given all others; return the number of changed levels.

    Args:
        target: the float matrix, [in, out].
        levels: [in, out], changed in place.
        scale: scales per input, [in, out].
        zero: zero points per input, [in, out].
        moments: E[x x^T], [in, in].
        form: defines the range of the levels.
    """
    slope = moments @ (target - (levels - zero) * scale)
    reciprocal = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    curvature = np.maximum(np.diagonal(moments), 1e-12)
    moved = 0
    for begin in range(0, len(levels), _PANEL):
        end = min(begin + _PANEL, len(levels))
        changes = np.empty((end - begin, levels.shape[1]), np.float32)
        for i in range(begin, end):
            step = np.rint(slope[i] / curvature[i] * reciprocal[i] + levels[i])
            new = np.clip(step, form.low, form.high)
            changes[i - begin] = (new - levels[i]) * scale[i]
            moved += int(np.count_nonzero(new != levels[i]))
            levels[i] = new
            slope[begin:end] -= moments[begin:end, i, None] * changes[i - begin]
        slope[:begin] -= moments[:begin, begin:end] @ changes
        slope[end:] -= moments[end:, begin:end] @ changes
    return moved
