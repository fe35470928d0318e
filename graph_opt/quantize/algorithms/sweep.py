"""Sweeps over the inputs of a matrix: each input gets its levels, and its change reaches those behind it.

GPTQ rounds what is left of the weights, and each error changes what is left of those behind it. Coordinate
descent moves each level to where the slope of the error ends, and subtracts the change times the row of the
moments. Within a panel of inputs a ``Panel`` does it; what follows the panel changes by one product.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ...graph.lazy import Array
from .blockwise import BlockFormat, Floats

PANEL = 128  # inputs


class SweepScales(NamedTuple):
    """Scales and zero points [blocks, out], and the block of each input in the order of the sweep, [in]."""

    scales: Floats
    zero_points: Floats
    blocks: Array

    def part(self, inputs: slice) -> SweepScales:
        """Return the grid of some inputs."""
        return self._replace(blocks=self.blocks[inputs])

    def weights(self, levels: Floats) -> Floats:
        """Return the weights that levels [in, out] stand for."""
        result: Floats = (levels - self.zero_points[self.blocks]) * self.scales[self.blocks]
        return result


class Panel(Protocol):
    """Sweeps a panel: NumPy's ``sweep_panel``, or the machine's own with the same bits."""

    def __call__(
        self,
        left: Floats,
        levels: Floats,
        grid: SweepScales,
        matrix: Floats,
        form: BlockFormat,
        *,
        moves: bool,
    ) -> Floats:
        """Set the levels of a panel, subtract its changes from what is left, and return them, [inputs, out].

        Args:
            left: weights, or with ``moves`` slopes, [inputs, out]; changed in place.
            levels: [inputs, out]; written, with ``moves`` also read.
            grid: of these inputs.
            matrix: the inverse factor or the moments, [inputs, inputs].
            form: defines the range of the levels.
            moves: whether levels move to where the slope ends.
        """


def sweep_panel(
    left: Floats, levels: Floats, grid: SweepScales, matrix: Floats, form: BlockFormat, *, moves: bool
) -> Floats:
    """Sweep a panel, as ``Panel`` says."""
    changes = np.empty_like(left)
    curvature = np.maximum(np.diagonal(matrix), np.float32(1e-12))
    for i in range(len(left)):
        scale, zero = grid.scales[grid.blocks[i]], grid.zero_points[grid.blocks[i]]
        reciprocal = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        if moves:
            level = np.clip(np.rint(left[i] / curvature[i] * reciprocal + levels[i]), form.low, form.high)
            changes[i] = (level - levels[i]) * scale
        else:
            level = np.clip(np.rint(left[i] * reciprocal) + zero, form.low, form.high)
            changes[i] = (left[i] - (level - zero) * scale) / matrix[i, i]
        levels[i] = level
        left[i + 1 :] -= matrix[i, i + 1 :, None] * changes[i]
    return changes


def panels(inputs: int, most: int = PANEL) -> list[slice]:
    """Return slices of at most ``most`` inputs."""
    return [slice(start, min(start + most, inputs)) for start in range(0, inputs, most)]
