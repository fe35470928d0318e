"""GPTQ: round weights one input at a time, and compensate each error in the inputs that follow.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323. Scales are chosen first, for the least error weighted by the inputs' mean
squares. Then inputs are processed in order of decreasing importance. Coordinate descent improves the levels
and the scales.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import Arithmetic
from .blockwise import BlockFormat, Floats, Quantized, scaled
from .cores import on_all_cores
from .grouped import Scales, refitted
from .inputs import Factor, Inputs
from .sweep import PANEL, Panel, SweepScales, panels

_COLUMNS = 256  # columns that one core rounds at a time
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
    order, moments, factor = inputs.order, inputs.damped, inputs.factor

    def solve(columns: slice) -> tuple[Floats, Floats]:  # which are independent of the others
        target = np.array(weight[:, columns], np.float32, order="C")
        found = arithmetic.starting_scales(target, form, inputs.importance)
        grid = SweepScales(found.scales, found.zero_points, natural[order])
        levels, slope = np.empty_like(target), np.empty_like(target)
        levels[order], slope[order] = rounded(target[order], grid, factor, form, arithmetic.panel)
        found = descend(slope, levels, found, moments, form, arithmetic.panel)
        values[:, columns] = levels
        return found.scales, found.zero_points

    starts = range(0, weight.shape[1], _COLUMNS)
    parts = on_all_cores(solve, [slice(start, start + _COLUMNS) for start in starts])
    scales, zero_points = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return Quantized(values, scales, None if form.symmetric else zero_points.astype(stored))


def rounded(
    target: Floats, grid: SweepScales, factor: Factor, form: BlockFormat, panel: Panel
) -> tuple[Floats, Floats]:
    """Return the levels of weights, and the slopes of the error there, both [in, out].

    Each weight is rounded after the errors before it have moved it, as GPTQ does. J. Chee et al., "QuIP",
    https://arxiv.org/abs/2307.13304, show that the factor of the moments gives the same levels as GPTQ's
    factor of their inverse. It needs no inverse, and the slopes cost half a product with the moments.

    Args:
        target: the weights, inputs in the order of the factor.
        grid: scales and zero points.
        factor: of the moments.
        form: defines the range of the levels.
        panel: sweeps a panel.
    """
    moved, levels, balanced = np.zeros_like(target), np.empty_like(target), np.empty_like(target)
    for inputs, inverse in factor.panels:
        part, behind = grid.part(inputs), slice(inputs.stop, None)
        # Within a panel errors count from what is left, as in GPTQ, so the inverse has what moved it before.
        left = target[inputs] + inverse.T @ moved[inputs]
        balanced[inputs] = panel(left, levels[inputs], part, inverse, form, moves=False)
        moved[behind] += factor.matrix[inputs, behind].T @ (target[inputs] - part.weights(levels[inputs]))
    return levels, factor.slopes(balanced)


def descend(
    slope: Floats, levels: Floats, start: Scales, moments: Floats, form: BlockFormat, panel: Panel
) -> Scales:
    """Move each level, then the scales beside it, to their best values given all others; return the scales.

    Coordinate descent (K. Behdin et al., "QuantEase: Optimization-based Quantization for Language Models",
    https://arxiv.org/abs/2309.01885) with the scales among the coordinates. A second pass would lower the
    squared error by 2 %; the divergence of SmolLM2 is the same without, Gemma 3's 0.0212 for 0.0206.

    Args:
        slope: the moments times the errors of the weights, [in, out]; changed in place.
        levels: [in, out], changed in place.
        start: the scales of the levels.
        moments: E[x x^T], [in, in].
        form: the format.
        panel: sweeps a panel.
    """
    scales = start._replace(scales=start.scales.copy())
    for inputs in panels(len(levels), max(PANEL, form.block_size, form.group_size)):
        blocks = slice(inputs.start // form.block_size, inputs.stop // form.block_size)
        part, near = start.part(blocks), moments[inputs, inputs]
        before = scaled(levels[inputs], form, part.scales, part.zero_points)
        _move_levels(slope[inputs].copy(), levels[inputs], part, near, form, panel)
        after = scaled(levels[inputs], form, part.scales, part.zero_points)
        steps = scaled(levels[inputs], form, np.ones_like(part.scales), part.zero_points)
        part = refitted(slope[inputs] - near @ (after - before), steps, part, near, form)
        scales.scales[blocks] = part.scales
        behind = slice(inputs.stop, None)
        changes = scaled(levels[inputs], form, part.scales, part.zero_points) - before
        slope[behind] -= moments[inputs, behind].T @ changes
    return scales


def _move_levels(
    slope: Floats, levels: Floats, scales: Scales, moments: Floats, form: BlockFormat, panel: Panel
) -> None:
    """Move each level to where the slope ends; both are changed in place."""
    blocks = np.arange(len(levels)) // form.block_size
    for inputs in panels(len(levels), PANEL):
        grid = SweepScales(scales.scales, scales.zero_points, blocks[inputs])
        near = moments[inputs, inputs]
        changes = panel(slope[inputs], levels[inputs], grid, near, form, moves=True)
        behind = slice(inputs.stop, None)
        slope[behind] -= moments[inputs, behind].T @ changes
