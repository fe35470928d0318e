"""Compute quantization grids of activations from calibration samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

import onnx_ir as ir

from ....records import dataclass
from ...graph.lazy import Array
from ..calibration.calibrators import CALIBRATORS, Histogram
from .grid import Grid, grid
from .values import Feed, float_values


@dataclass(slots=True)
class Range:
    """The observed range of one value.

    Attributes:
        low: the smallest number, at most 0.
        high: the largest number, at least 0.
        magnitudes: histogram of the magnitudes.
    """

    low: float = 0.0
    high: float = 0.0
    magnitudes: Histogram = field(default_factory=Histogram)

    def add(self, values: Array) -> None:
        """Count more values, which must be finite."""
        if values.size:
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))
            self.magnitudes.add(values)

    def grid(self, calibrator: str, dtype: ir.DataType) -> Grid:
        """Return the grid with the limits that a calibrator selects.

        One histogram of magnitudes is enough for asymmetric grids too: zero is a level, so positive and
        negative values have the same rounding error, and the limit clips both signs.
        """
        choose = CALIBRATORS[calibrator]
        if dtype == ir.DataType.INT8:
            limit = choose(self.magnitudes)
        else:
            limit = choose(self.magnitudes, lambda limit: self._width(limit) / 255)
        return grid(max(self.low, -limit), min(self.high, limit), dtype)

    def _width(self, limit: float) -> float:
        return max(
            min(self.high, limit) + min(-self.low, limit), limit
        )  # the limit alone if all values are 0


def value_ranges(model: Path, names: Sequence[str], feeds: Sequence[Feed]) -> dict[str, Range]:
    """Return the ranges of values of a saved float graph on samples, by name; memory use is limited.

    Raises:
        GraphError: a value holds NaN or infinity, or the graph cannot run.
    """
    ranges = {name: Range() for name in names}
    if not names:
        return ranges
    for _, values in float_values(model, names, feeds):
        for name, content in values.items():
            ranges[name].add(content)
    return ranges


def grids(ranges: Mapping[str, Range], calibrator: str, dtype: ir.DataType) -> dict[str, Grid]:
    """Return the grid of each value, by name."""
    return {name: one.grid(calibrator, dtype) for name, one in ranges.items()}
