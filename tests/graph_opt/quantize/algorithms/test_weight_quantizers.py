"""Properties of all weight-only algorithms, and the advantage of each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from carryall.errors import GraphError
from carryall.graph_opt.quantize.algorithms import awq, gptq, hqq, kquant
from carryall.graph_opt.quantize.algorithms.blockwise import (
    BlockFormat,
    Quantized,
    dequantize,
    round_to_nearest,
)
from carryall.graph_opt.quantize.algorithms.inputs import Inputs
from carryall.graph_opt.quantize.weight_methods import UNCALIBRATED

Floats = npt.NDArray[np.float32]
FORMS = [
    BlockFormat(bits=bits, block_size=size, symmetric=symmetric)
    for bits in (4, 8)
    for size in (16, 32, 64, 128, 256)
    for symmetric in (True, False)
]


def weights(inputs: int, outputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((inputs, outputs)).astype(np.float32)


def solved(algorithm: str, weight: Floats, form: BlockFormat, moments: Floats | None = None) -> Quantized:
    if algorithm in UNCALIBRATED:
        return UNCALIBRATED[algorithm](weight, form)
    known = np.eye(len(weight), dtype=np.float32) if moments is None else moments
    return {"awq": awq.quantize, "gptq": gptq.quantize}[algorithm](weight, form, Inputs(known))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("algorithm", [*UNCALIBRATED, "awq", "gptq"])
def test_levels_fit_and_errors_are_small(algorithm: str, form: BlockFormat) -> None:
    matrix = weights(256, 7)
    result = solved(algorithm, matrix, form)
    assert form.low <= result.values.min() <= result.values.max() <= form.high
    assert result.scales.shape == (256 // form.block_size, 7)
    assert (result.zero_points is None) == form.symmetric
    error = np.sqrt(np.square(dequantize(result, form) - matrix).mean())
    assert error < {4: 0.14, 8: 0.011}[form.bits]


@pytest.mark.parametrize("algorithm", [*UNCALIBRATED, "awq", "gptq"])
def test_zeros_stay_and_bad_numbers_are_refused(algorithm: str) -> None:
    matrix = weights(32, 3)
    matrix[:, 1] = 0
    for symmetric in (True, False):
        form = BlockFormat(symmetric=symmetric)
        assert not dequantize(solved(algorithm, matrix, form), form)[:, 1].any()
    matrix[3, 2] = np.nan
    with pytest.raises(GraphError, match="NaN or infinity"):
        solved(algorithm, matrix, BlockFormat())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("algorithm", [*UNCALIBRATED])
def test_blocks_of_one_or_two_values_are_restored(algorithm: str, bits: int) -> None:
    """No line fits one value best, and none can do with zero points between the values."""
    rng = np.random.default_rng(0)
    value = np.repeat(rng.lognormal(-3, 2, (8, 50)) * rng.choice([-1, 1], (8, 50)), 32, 0)
    form = BlockFormat(bits=bits, block_size=32, symmetric=False)
    for other in (1, 0, 1.001):
        matrix = np.where(rng.random(value.shape) < 0.5, value, other * value).astype(np.float32)
        found = dequantize(UNCALIBRATED[algorithm](matrix, form), form)
        np.testing.assert_array_less(np.abs(found - matrix), np.abs(value) * 0.002)


def test_hqq_allows_large_errors_of_outliers() -> None:
    """With heavy tails, most weights have smaller errors than by least squares."""
    matrix = np.random.default_rng(1).standard_t(3, (1024, 32)).astype(np.float32)
    form = BlockFormat(block_size=64, symmetric=False)
    norms = [
        (np.abs(dequantize(result, form) - matrix) ** 0.7).sum()
        for result in (hqq.quantize(matrix, form), kquant.quantize(matrix, form))
    ]
    assert norms[0] < norms[1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_kquant_fits_large_weights_better(block_size: int, symmetric: bool) -> None:
    matrix = weights(512, 32)
    form = BlockFormat(block_size=block_size, symmetric=symmetric)
    blocks = np.abs(matrix).reshape(-1, block_size, 32)
    importance = (np.sqrt(np.square(blocks).mean(1, keepdims=True)) + blocks).reshape(matrix.shape)
    errors = [
        float((importance * np.square(dequantize(result, form) - matrix)).sum())
        for result in (kquant.quantize(matrix, form), round_to_nearest(matrix, form))
    ]
    assert errors[0] < errors[1]


def test_awq_makes_large_channels_finer() -> None:
    """A few channels contribute most of the products, as in large models."""
    rng = np.random.default_rng(2)
    sizes = np.where(rng.random(128) < 0.05, 20, 1)
    x = (rng.standard_normal((2000, 128)) * sizes).astype(np.float32)
    moments: Floats = (x.T @ x / 2000).astype(np.float32)
    matrix, form = weights(128, 48), BlockFormat(block_size=64)
    scale = awq.factors([matrix], form, Inputs(moments))
    assert scale[sizes == 20].mean() > 2 * scale[sizes == 1].mean()
    exact = x @ matrix
    scaled = awq.quantize(matrix * scale[:, None], form, Inputs(moments).scaled(scale))
    found = [x / scale @ dequantize(scaled, form), x @ dequantize(round_to_nearest(matrix, form), form)]
    errors = [float(np.square(one - exact).mean()) for one in found]
    assert errors[0] < 0.5 * errors[1]
