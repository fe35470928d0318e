"""The inner loops of the calibrated algorithms."""

from __future__ import annotations

from collections.abc import Callable

from ....records import dataclass
from .blockwise import BlockFormat, Floats, Quantizer, round_to_nearest
from .grouped import Scales, starting_scales
from .sweep import Panel, sweep_panel


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """NumPy's inner loops, or those of a machine's own routines with the same bits.

    Args:
        round_to_nearest: ``blockwise.round_to_nearest``.
        starting_scales: ``grouped.starting_scales``.
        panel: ``sweep.sweep_panel``.
    """

    round_to_nearest: Quantizer = round_to_nearest
    starting_scales: Callable[[Floats, BlockFormat, Floats], Scales] = starting_scales
    panel: Panel = sweep_panel
