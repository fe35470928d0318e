"""GPTQ's results on correlated inputs, and its edge cases."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from carryall.errors import GraphError
from carryall.graph_opt.quantize.algorithms import gptq
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Quantized, round_to_nearest
from carryall.graph_opt.quantize.algorithms.inputs import Inputs
from carryall.graph_opt.quantize.algorithms.sweep import SweepScales, sweep_panel

RNG = np.random.default_rng(0)
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def dequantized(result: Quantized, form: BlockFormat) -> Floats:
    levels = result.values.astype(np.float32)
    if result.zero_points is not None:
        levels -= np.repeat(result.zero_points.astype(np.float32), form.block_size, 0)
    values: Floats = levels * np.repeat(result.scales, form.block_size, 0)
    return values


def correlated_inputs(count: int, width: int) -> Floats:
    """Return inputs with a few strong directions and different magnitudes, as activations have."""
    mixed = RNG.standard_normal((count, 12)) @ RNG.standard_normal((12, width))
    return ((mixed + 0.3 * RNG.standard_normal((count, width))) * RNG.uniform(0.2, 3, width)).astype(
        np.float32
    )


@pytest.mark.long
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (4, 128), (8, 64)])
def test_products_with_typical_inputs_are_nearer_than_by_rounding(
    bits: int, block_size: int, symmetric: bool
) -> None:
    form = BlockFormat(bits=bits, block_size=block_size, symmetric=symmetric)
    weight = RNG.standard_normal((256, 1100)).astype(np.float32)  # more columns than one chunk
    x = correlated_inputs(2000, 256)
    moments = x.T @ x / np.float32(len(x))
    exact = x @ weight
    errors = [
        float(np.square(x @ dequantized(result, form) - exact).mean())
        for result in (gptq.quantize(weight, form, Inputs(moments)), round_to_nearest(weight, form))
    ]
    assert errors[0] < 0.4 * errors[1]


def gptq_levels(weight: Floats, inputs: Inputs, scales: Doubles, block_size: int) -> Doubles:
    """Return the levels by the paper's recurrence, with the factor of the moments' inverse, in float64."""
    order = inputs.order
    factor = np.linalg.cholesky(np.linalg.inv(inputs.damped.astype(np.float64)[np.ix_(order, order)])).T
    left, levels = weight[order].astype(np.float64), np.empty(weight.shape)
    for k, row in enumerate(left):
        scale = scales[order[k] // block_size]
        levels[order[k]] = level = np.clip(np.rint(row / scale), -8, 7)
        left[k + 1 :] -= np.outer(factor[k, k + 1 :], (row - level * scale) / factor[k, k])
    return levels


@pytest.mark.parametrize("width", [96, 320, 1088])
def test_levels_are_those_of_the_recurrence_with_the_inverse(width: int) -> None:
    """1,088 inputs are several blocks of the factor, and several panels; the last ones are not whole."""
    form = BlockFormat(block_size=32)
    x = correlated_inputs(1500, width)
    inputs = Inputs(x.T @ x / np.float32(len(x)))
    weight = RNG.standard_normal((width, 24)).astype(np.float32)
    scales = np.full((width // 32, 24), 0.25, np.float32)
    levels = np.empty_like(weight)
    grid = SweepScales(scales, np.zeros_like(scales), np.arange(width)[inputs.order] // 32)
    levels[inputs.order] = gptq.rounded(weight[inputs.order], grid, inputs.factor, form, sweep_panel)
    expected = gptq_levels(weight, inputs, scales.astype(np.float64), 32)
    # In float32 a value between two levels can get the other one, and moves some of those behind it.
    assert (levels != expected).mean() < 0.01
    damped = inputs.damped.astype(np.float64)
    errors = [weight - each * np.repeat(scales, 32, 0) for each in (levels, expected)]
    found, wanted = ((each * (damped @ each)).sum() for each in errors)
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_values_stay_in_range_and_zeros_stay_zero() -> None:
    form = BlockFormat(block_size=16)
    weight = RNG.standard_normal((32, 5)).astype(np.float32)
    weight[:, 2] = 0
    result = gptq.quantize(weight, form, Inputs(np.eye(32, dtype=np.float32)))
    assert result.values.dtype == np.int8
    assert -8 <= result.values.min() <= result.values.max() <= 7
    assert not dequantized(result, form)[:, 2].any()


def test_unused_inputs_are_accepted() -> None:
    form = BlockFormat(block_size=16)
    moments = np.diag(np.repeat([1.0, 0.0], 16)).astype(np.float32)
    weight = RNG.standard_normal((32, 5)).astype(np.float32)
    result = dequantized(gptq.quantize(weight, form, Inputs(moments)), form)
    np.testing.assert_allclose(result[:16], weight[:16], atol=0.35)


def test_a_nan_weight_is_refused() -> None:
    weight = np.full((32, 2), np.nan, np.float32)
    with pytest.raises(GraphError, match="it holds NaN or infinity"):
        gptq.quantize(weight, BlockFormat(block_size=16), Inputs(np.eye(32, dtype=np.float32)))
