"""GPTQ: round weights one input at a time, and compensate each error in the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen first, for the least error weighted by the inputs' mean
squares. Then inputs are processed in order of decreasing importance. Coordinate descent on levels and scales
behind it (QuantEase, https://arxiv.org/abs/2309.01885) took as long again, and changed SmolLM2's divergence
by less than its noise.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Arithmetic
from .blockwise import BlockFormat, Floats, Quantized
from .cores import on_all_cores
from .inputs import Factor, Inputs
from .sweep import PANEL, Panel, SweepScales, panels

_COLUMNS = 256  # columns that one core rounds at a time
_BLOCK = 4 * PANEL  # inputs that the errors of all before them move by one product
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
    order, factor = inputs.order, inputs.factor

    def solve(columns: slice) -> tuple[Floats, Floats]:  # which are independent of the others
        target = np.array(weight[:, columns], np.float32, order="C")
        found = arithmetic.starting_scales(target, form, inputs.importance)
        grid = SweepScales(found.scales, found.zero_points, natural[order])
        values[order, columns] = rounded(target[order], grid, factor, form, arithmetic.panel)
        return found.scales, found.zero_points

    starts = range(0, weight.shape[1], _COLUMNS)
    parts = on_all_cores(solve, [slice(start, start + _COLUMNS) for start in starts])
    scales, zero_points = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def rounded(target: Floats, grid: SweepScales, factor: Factor, form: BlockFormat, panel: Panel) -> Floats:
    """Return the levels of weights, [in, out].

    Each weight is rounded after the errors before it have moved it, as GPTQ does. J. Chee et al., "QuIP",
    https://arxiv.org/abs/2307.13304, show that the factor of the moments gives the same levels as GPTQ's
    factor of their inverse, and needs no inverse.

    Args:
        target: the weights, inputs in the order of the factor.
        grid: scales and zero points.
        factor: of the moments.
        form: defines the range of the levels.
        panel: sweeps a panel.
    """
    levels, errors, upper = np.empty_like(target), np.empty_like(target), factor.matrix
    for block in panels(len(target), _BLOCK):
        moved = upper[: block.start, block].T @ errors[: block.start]
        for inputs in panels(len(moved)):
            here = slice(block.start + inputs.start, block.start + inputs.stop)
            near, part = slice(block.start, here.start), grid.part(here)
            # Within a panel errors count from what is left, as in GPTQ: the inverse has what moved it before.
            inverse = factor.inverses[here.start // PANEL]
            left = target[here] + inverse.T @ (moved[inputs] + upper[near, here].T @ errors[near])
            panel(left, levels[here], part, inverse, form)
            errors[here] = target[here] - part.weights(levels[here])
    return levels
