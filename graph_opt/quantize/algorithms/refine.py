"""The scales of given levels.

The scales of a column with the least error of calibration products solve a small linear system.
"""

from __future__ import annotations

import numpy as np

from ...graph.lazy import Array
from .blockwise import Floats

_SYSTEM_BYTES = 64 << 20  # size of the linear systems solved at a time
_RIDGE = 1e-4  # relative to a block's diagonal entry; blocks without influence keep their scale


def fit_scales(slope: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    """Return the scales [blocks, out] with the least squared error of the products, given the levels.

    Args:
        slope: moments @ (the float matrix - the dequantized one), [in, out].
        levels: levels minus zero points, [in, out].
        scales: the current scales, [blocks, out].
        moments: E[x x^T], [in, in].
    """
    parts = [
        _fit(slope[:, columns], levels[:, columns], scales[:, columns], moments)
        for columns in column_parts(*scales.shape)
    ]
    return np.concatenate(parts, axis=1)


def _fit(slope: Floats, levels: Floats, scales: Floats, moments: Floats) -> Floats:
    systems, slopes = block_systems(slope, levels, len(scales), moments)
    diagonal = np.einsum("nbb->nb", systems)
    diagonal += _RIDGE * diagonal + max(1e-12 * float(diagonal.mean()), 1e-30)
    moves = np.linalg.solve(systems, slopes[..., None])[..., 0]
    result: Floats = np.ascontiguousarray(scales + moves.T, np.float32)
    return result


def column_parts(blocks: int, outputs: int) -> list[slice]:
    """Return slices of columns whose linear systems fit in memory."""
    width = max(1, _SYSTEM_BYTES // (8 * blocks * blocks))
    return [slice(start, start + width) for start in range(0, outputs, width)]


def block_systems(slope: Floats, levels: Floats, blocks: int, moments: Floats) -> tuple[Array, Array]:
    """Return A [out, blocks, blocks] and b [out, blocks] of the error m^T A m - 2 b^T m of moved scales."""
    outputs = levels.shape[1]
    cut = levels.reshape(blocks, -1, outputs)
    systems = np.empty((outputs, blocks, blocks))
    for index, part in enumerate(cut):
        begin, end = index * len(part), (index + 1) * len(part)
        spread = (moments[:end, begin:end] @ part).reshape(index + 1, *part.shape)
        row = np.einsum("bin,bin->nb", cut[: index + 1], spread)
        systems[:, index, : index + 1] = systems[:, : index + 1, index] = row  # symmetric, as the moments
    return systems, np.einsum("bin,bin->nb", cut, slope.reshape(cut.shape))
