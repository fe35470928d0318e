"""Sweeps over the inputs of a matrix: each input gets its levels, and its error reaches those behind it.

Within a panel of inputs a ``Panel`` does it; what follows the panel changes by products.
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
    ) -> None:
        """Set the levels of a panel, and subtract its errors from what is left.

        Args:
            left: weights, [inputs, out]; changed in place.
            levels: [inputs, out]; written.
            grid: of these inputs.
            matrix: the inverse factor, [inputs, inputs].
            form: defines the range of the levels.
        """


def sweep_panel(left: Floats, levels: Floats, grid: SweepScales, matrix: Floats, form: BlockFormat) -> None:
    """Sweep a panel, as ``Panel`` says."""
    for i in range(len(left)):
        scale, zero = grid.scales[grid.blocks[i]], grid.zero_points[grid.blocks[i]]
        reciprocal = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        levels[i] = np.clip(np.rint(left[i] * reciprocal) + zero, form.low, form.high)
        error = (left[i] - (levels[i] - zero) * scale) / matrix[i, i]
        left[i + 1 :] -= matrix[i, i + 1 :, None] * error


def panels(inputs: int, most: int = PANEL) -> list[slice]:
    """Return slices of at most ``most`` inputs."""
    return [slice(start, min(start + most, inputs)) for start in range(0, inputs, most)]
