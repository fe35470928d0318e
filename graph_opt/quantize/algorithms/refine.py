"""The scales of given levels.

The scales of a column with the least error of calibration products solve a small linear system.
"""

from __future__ import annotations

import numpy as np

from ...graph.lazy import Array
from .blockwise import Floats

_SYSTEM_BYTES = 64 << 20  # size of the linear systems solved at a time
_RIDGE = 1e-4  # relative to a block's diagonal entry; blocks without influence keep their scale


def fit_scales(pull: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    """Return the scales [blocks, out] with the least squared error of the products, given the levels.

    Args:
        pull: moments @ the float matrix, [in, out].
        levels: levels minus zero points, [in, out].
        scales: the current scales, [blocks, out].
        moments: E[x x^T], [in, in].
    """
    parts = [
        _fit(pull[:, columns], levels[:, columns], scales[:, columns], moments)
        for columns in column_parts(*scales.shape)
    ]
    return np.concatenate(parts, axis=1)


def _fit(pull: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    systems, aims = block_systems(pull, levels, len(scales), moments)
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


def block_systems(pull: Floats, levels: Floats, blocks: int, moments: Floats) -> tuple[Array, Array]:
    """Return A [out, blocks, blocks] and b [out, blocks] of the error s^T A s - 2 b^T s of scales s."""
    outputs = levels.shape[1]
    cut = levels.reshape(blocks, -1, outputs)
    systems = np.empty((outputs, blocks, blocks))
    for index, part in enumerate(cut):
        begin, end = index * len(part), (index + 1) * len(part)
        spread = (moments[:end, begin:end] @ part).reshape(index + 1, *part.shape)
        row = np.einsum("bin,bin->nb", cut[: index + 1], spread)
        systems[:, index, : index + 1] = systems[:, : index + 1, index] = row  # symmetric, as the moments
    return systems, np.einsum("bin,bin->nb", cut, pull.reshape(cut.shape))
