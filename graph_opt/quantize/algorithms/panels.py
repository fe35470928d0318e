"""Matrices in panels that fit in the L2 cache, and the rounding of a panel with many scales.

Shapes: a panel is [blocks, block_size, columns]; its scales and zero points are [blocks, 1, columns].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .cores import on_all_cores

if TYPE_CHECKING:
    from .blockwise import BlockFormat, Floats

_SHARED_SIZE = 1 << 25  # elements; larger matrices, such as embeddings, are quantized by all cores
_PANEL_SIZE = 1 << 17  # weights of a panel, 512 KiB: two to four arrays of this size are in use
_COLUMNS = 512  # of a panel, at most
_SMALLEST = np.finfo(np.float32).tiny  # the reciprocal of a smaller number exceeds float32


class Part(NamedTuple):
    """The place of a panel: indices of its weights in the matrix, and of its blocks in the scales."""

    weights: tuple[slice, slice]
    blocks: tuple[slice, slice]


def for_each_part(work: Callable[[Part], None], weight: Floats, form: BlockFormat) -> None:
    """Call ``work`` with all parts of a matrix, whole groups of blocks, in parallel for a large matrix."""
    size, step = form.block_size, max(form.block_size, form.group_size)
    across = _slices(weight.shape[1], _COLUMNS, 1)
    down = _slices(len(weight), max(1, _PANEL_SIZE // across[0].stop // step) * step, step)
    parts = [
        Part((rows, columns), (slice(rows.start // size, rows.stop // size), columns))
        for rows in down
        for columns in across
    ]
    if weight.size < _SHARED_SIZE:
        for part in parts:
            work(part)
        return
    on_all_cores(work, parts)


def _slices(length: int, most: int, step: int) -> list[slice]:
    """Cut a length into nearly equal slices of at most ``most``, all but the last multiples of ``step``."""
    size = -(-length // (-(-length // most) * step)) * step
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def panel_of(weight: Floats, part: Part, form: BlockFormat) -> Floats:
    """Return a part of the matrix as a panel."""
    panel = np.ascontiguousarray(weight[part.weights], np.float32)
    return panel.reshape(-1, form.block_size, panel.shape[1])


def scales_by_panel(
    weight: Floats, form: BlockFormat, choose: Callable[[Floats, Part], tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Return the scales and zero points [in / block_size, out] that ``choose`` finds for each panel."""
    shape = (len(weight) // form.block_size, weight.shape[1])
    scales, zero_points = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def fill(part: Part) -> None:
        scale, zero_point = choose(panel_of(weight, part, form), part)
        scales[part.blocks], zero_points[part.blocks] = scale[:, 0], zero_point[:, 0]

    for_each_part(fill, weight, form)
    return scales, zero_points


class Rounding:
    """Rounds a panel with many scales, always into the same memory: new pages cost more than the arithmetic.

    Args:
        panel: the weights.
        form: their storage format.
        importance: factors of squared errors, of a shape that broadcasts to the panel's; None for 1.
    """

    def __init__(self, panel: Floats, form: BlockFormat, importance: Floats | None = None) -> None:
        self._panel, self._form, self._importance = panel, form, importance
        self._levels = np.empty_like(panel)
        self._weighted = self._levels if importance is None else np.empty_like(panel)

    def levels(self, scales: Floats, zero_points: Floats) -> Floats:
        """Return the nearest levels minus zero points; valid until the next call."""
        levels = np.multiply(self._panel, reciprocal(scales), out=self._levels)
        np.rint(levels, out=levels)
        np.maximum(levels, self._form.low - zero_points, out=levels)
        return np.minimum(levels, self._form.high - zero_points, out=levels)

    def weighted(self, scales: Floats, zero_points: Floats) -> tuple[Floats, Floats]:
        """Return the levels minus zero points, and their products with the importance."""
        levels = self.levels(scales, zero_points)
        if self._importance is not None:
            np.multiply(levels, self._importance, out=self._weighted)
        return levels, self._weighted

    def products(self, scales: Floats, zero_points: Floats) -> tuple[Floats, Floats]:
        """Return the weighted <w, q> and <q, q> of weights w and levels minus zero points q of each block.

        The error of the levels with a scale s is |w|^2 - 2 s <w, q> + s^2 <q, q>.
        """
        levels, weighted = self.weighted(scales, zero_points)
        return inner(self._panel, weighted), inner(levels, weighted)


def inner(one: Floats, other: Floats) -> Floats:
    """Return the inner products of the blocks of two panels, [blocks, 1, columns]."""
    result: Floats = np.einsum("bin,bin->bn", one, other)[:, None]
    return result


def reciprocal(values: Floats) -> Floats:
    """Return 1 / values, and 0 where it would exceed float32."""
    return np.reciprocal(np.where(np.abs(values) < _SMALLEST, np.float32(np.inf), values))


def quotient(product: Floats, square: Floats) -> Floats:
    """Return the least-squares factor <w, q> / <q, q>, and 0 for levels q that are all 0."""
    result: Floats = np.divide(product, np.maximum(square, np.float32(1e-30)))
    return result
