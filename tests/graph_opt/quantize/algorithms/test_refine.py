"""The scales of given levels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from carryall.graph_opt.quantize.algorithms import refine
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, dequantize, round_to_nearest

Floats = npt.NDArray[np.float32]


def problem(
    form: BlockFormat, inputs: int = 128, outputs: int = 20
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return a weight, its levels, scales and zero points by rounding, and the moments of its inputs."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 20)) @ rng.standard_normal((20, inputs)) + rng.standard_normal(
        (400, inputs)
    )
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    result = round_to_nearest(weight, form)
    zero = (
        np.zeros_like(result.scales) if result.zero_points is None else result.zero_points.astype(np.float32)
    )
    return weight, result.values.astype(np.float32), result.scales, zero, (x.T @ x / 400).astype(np.float32)


def error(weight: Floats, levels: Floats, scales: Floats, zero: Floats, moments: Floats) -> float:
    size = len(weight) // len(scales)
    off = (levels - np.repeat(zero, size, 0)) * np.repeat(scales, size, 0) - weight
    return float(np.einsum("ij,ij->", off, moments @ off))


def slope_of(weight: Floats, steps: Floats, scales: Floats, moments: Floats) -> Floats:
    result: Floats = moments @ (weight - steps * np.repeat(scales, len(weight) // len(scales), 0))
    return result


@pytest.mark.parametrize(("size", "symmetric"), [(32, True), (32, False), (256, False)])
def test_the_best_scales_make_the_error_smaller(size: int, symmetric: bool) -> None:
    form = BlockFormat(block_size=size, symmetric=symmetric)
    weight, levels, scales, zero, moments = problem(form, 4 * size)
    steps = levels - np.repeat(zero, size, 0)
    fitted = refine.fit_scales(slope_of(weight, steps, scales, moments), steps, scales, moments)
    before, after = (error(weight, levels, each, zero, moments) for each in (scales, fitted))
    assert after < 0.99 * before


def test_scales_equal_a_dense_solver() -> None:
    form = BlockFormat(block_size=16)
    weight, levels, scales, _, moments = problem(form, 48, 3)
    found = refine.fit_scales(slope_of(weight, levels, scales, moments), levels, scales, moments)
    root = np.linalg.cholesky(moments.astype(np.float64)).T
    for column in range(3):
        design = np.stack(
            [root[:, b * 16 : b * 16 + 16] @ levels[b * 16 : b * 16 + 16, column] for b in range(3)]
        )
        expected = np.linalg.lstsq(design.T, root @ weight[:, column], rcond=None)[0]
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-3)


def test_blocks_of_zeros_keep_their_scale() -> None:
    form = BlockFormat(block_size=16)
    moments = np.eye(32, dtype=np.float32)
    scales = np.full((2, 3), 0.5, np.float32)
    levels = np.zeros((32, 3), np.float32)
    levels[:16] = 2
    weight = np.ones((32, 3), np.float32)
    found = refine.fit_scales(slope_of(weight, levels, scales, moments), levels, scales, moments)
    np.testing.assert_allclose(found[1], 0.5)
    np.testing.assert_allclose(found[0], 0.5, rtol=1e-3)
    assert dequantize(round_to_nearest(np.zeros((32, 3), np.float32), form), form).max() == 0
