"""GPTQ: round weights one input at a time, and compensate each error in the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen first, for the least error weighted by the inputs' mean
squares. Then inputs are processed in order of decreasing importance. Coordinate descent improves the levels,
least squares the scales.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Arithmetic
from .blockwise import BlockFormat, Floats, Quantized, scaled
from .grouped import refitted
from .inputs import Inputs
from .sweep import SweepScales, descend, round_in_order

_COLUMNS = 1024  # columns rounded at a time
_SWEEPS = 2  # of coordinate descent; more have nearly no effect
_PLAIN = Arithmetic()


def quantize(weight: Floats, form: BlockFormat, inputs: Inputs, arithmetic: Arithmetic = _PLAIN) -> Quantized:
    """Quantize a matrix [in, out] so that its products with calibration inputs change least.

    Args:
        weight: the matrix.
        form: its storage format.
        inputs: its inputs on the calibration text.
        arithmetic: the inner loops.

    Raises:
        GraphError: the matrix holds NaN or infinity.
    """
    stored = np.int8 if form.symmetric else np.uint8
    values = np.empty_like(weight, stored, subok=False)
    natural = np.arange(len(weight)) // form.block_size
    order, moments = inputs.order, inputs.damped

    def solve(columns: slice) -> tuple[Floats, Floats]:  # which are independent of the others
        target = np.array(weight[:, columns], np.float32, order="C")
        found = arithmetic.starting_scales(target, form, inputs.importance)
        grid = SweepScales(found.scales, found.zero_points, natural[order])
        levels = np.empty_like(target)
        levels[order] = round_in_order(target[order], grid, inputs.factor, form, arithmetic.panel)
        grid, pull = grid._replace(blocks=natural), moments @ target
        for _ in range(_SWEEPS):
            slope = pull - moments @ scaled(levels, form, found.scales, found.zero_points)
            descend(slope, levels, grid, moments, form, arithmetic.panel)
        values[:, columns] = levels
        steps = scaled(levels, form, np.ones_like(found.scales), found.zero_points)
        return refitted(pull, steps, found, moments, form).scales, found.zero_points

    starts = range(0, weight.shape[1], _COLUMNS)
    parts = [solve(slice(start, start + _COLUMNS)) for start in starts]
    scales, zero_points = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))
