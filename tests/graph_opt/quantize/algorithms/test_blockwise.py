from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Quantized, round_to_nearest

Floats = npt.NDArray[np.float32]
formats = st.builds(
    BlockFormat,
    bits=st.sampled_from([4, 8]),
    block_size=st.sampled_from([16, 32]),
    symmetric=st.booleans(),
)


def weights(inputs: int, outputs: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((inputs, outputs)).astype(np.float32)


def dequantized(result: Quantized, form: BlockFormat) -> Floats:
    """Return the result of ONNX's DequantizeLinear."""
    values = result.values.astype(np.float32)
    if result.zero_points is not None:
        values -= np.repeat(result.zero_points.astype(np.float32), form.block_size, 0)
    product: Floats = values * np.repeat(result.scales, form.block_size, 0)
    return product


@given(formats, st.integers(1, 3), st.integers(1, 5), st.integers(0, 100))
def test_weights_are_within_steps(form: BlockFormat, blocks: int, outputs: int, seed: int) -> None:
    """Errors are at most half a step inside the range; at 4 bits 12 % of the range may be clipped."""
    matrix = weights(blocks * form.block_size, outputs, seed)
    result = round_to_nearest(matrix, form)
    assert result.values.min() >= form.low
    assert result.values.max() <= form.high
    step = np.repeat(np.abs(result.scales), form.block_size, 0)
    limit = 1.01 if form.bits == 8 else 2.5
    assert (np.abs(dequantized(result, form) - matrix) <= limit * step).all()


@given(formats, st.integers(0, 20))
def test_levels_are_restored_exactly(form: BlockFormat, seed: int) -> None:
    """A representable matrix is restored exactly."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(form.low, form.high + 1, (form.block_size, 3))
    levels[:2] = [[form.low] * 3, [form.high] * 3]
    matrix = ((levels - (0 if form.symmetric else 7)) * 0.25).astype(np.float32)
    np.testing.assert_allclose(dequantized(round_to_nearest(matrix, form), form), matrix, atol=1e-5)


@pytest.mark.parametrize("block_size", [32, 128])
def test_the_error_is_well_below_that_of_plain_rounding(block_size: int) -> None:
    matrix = weights(512, 64)
    blocks = matrix.reshape(-1, block_size, 64)
    scale = np.abs(blocks).max(1, keepdims=True) / 7
    plain = (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(matrix.shape)
    form = BlockFormat(block_size=block_size)
    ours = dequantized(round_to_nearest(matrix, form), form)
    assert np.square(ours - matrix).sum() < 0.8 * np.square(plain - matrix).sum()


def test_zero_points_help_one_sided_blocks() -> None:
    matrix = np.abs(weights(64, 8)) + 1
    errors = []
    for symmetric in (True, False):
        form = BlockFormat(symmetric=symmetric)
        errors.append(np.square(dequantized(round_to_nearest(matrix, form), form) - matrix).sum())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("form", [BlockFormat(), BlockFormat(symmetric=False), BlockFormat(bits=8)])
def test_zeros_stay_zeros(form: BlockFormat) -> None:
    result = round_to_nearest(np.zeros((64, 2), np.float32), form)
    assert np.isfinite(result.scales).all()
    assert not dequantized(result, form).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_values_are_an_error(value: float) -> None:
    matrix = weights(32, 2)
    matrix[3, 1] = value
    with pytest.raises(GraphError, match="NaN or infinity"):
        round_to_nearest(matrix, BlockFormat())


def test_column_major_matrices_stay_column_major() -> None:
    """An embedding [vocab, hidden] is quantized as its transpose without a copy."""
    matrix = weights(64, 300)
    by_row = round_to_nearest(matrix, BlockFormat())
    by_column = round_to_nearest(np.asfortranarray(matrix), BlockFormat())
    assert by_column.values.T.flags.c_contiguous
    np.testing.assert_array_equal(by_row.values, by_column.values)


@pytest.mark.parametrize(("bits", "block_size"), [(3, 32), (4, 20), (4, 512), (4, 8)])
def test_formats_without_kernels_are_refused(bits: int, block_size: int) -> None:
    with pytest.raises(UsageError):
        BlockFormat(bits=bits, block_size=block_size)
