"""Scales with common units: exact, within a byte, found by the lowering, and as good as free ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from decoded_tiles import attributes
from graph_asserts import apply, graph
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.graph_opt.graph.half_scales import Widened
from carryall.graph_opt.lower.products.quantized_linear import QuantizedLinearPass
from carryall.graph_opt.quantize.algorithms import gptq, kquant, panels
from carryall.graph_opt.quantize.algorithms.blockwise import (
    BlockFormat,
    Floats,
    Quantized,
    Quantizer,
    choose_scales,
    dequantize,
    round_to_nearest,
)
from carryall.graph_opt.quantize.algorithms.grouped import Scales, grouped, share_units
from carryall.graph_opt.quantize.algorithms.inputs import Inputs

FREE = BlockFormat(bits=4, block_size=32, symmetric=False)
SHARED = dataclasses.replace(FREE, group_size=128)


def matrix(seed: int, inputs: int = 320, outputs: int = 40) -> Floats:
    """Return columns of different sizes, with some large values, as trained weights have."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(6, (inputs, outputs)) * rng.uniform(1e-3, 1, outputs)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([64, 128, 192, 256]),
    st.floats(-5, 3),
)
def test_scales_are_exact_multiples_and_weights_fit_a_byte(
    seed: int, block: int, group: int, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    form = dataclasses.replace(FREE, block_size=block, group_size=group)
    shape = (320 // block, 9)
    scales = (rng.lognormal(0, 1, shape) * 10.0**magnitude).astype(np.float32)
    scales[rng.random(shape) < 0.05] = 0
    zero_points = rng.integers(0, 16, shape).astype(np.float32)
    weight = (rng.standard_normal((320, 9)) * np.repeat(scales, block, 0)).astype(np.float32)
    found = share_units(weight, Scales(scales, zero_points), form, np.ones(320, np.float32))
    np.testing.assert_array_equal(found.scales.astype(np.float16), found.scales)
    assert found.multiples is not None
    assert (found.multiples * np.maximum(found.zero_points, 15 - found.zero_points) <= 127).all()
    units = found.scales / found.multiples
    per_group = group // block
    for start in range(0, len(units), per_group):
        assert (units[start : start + per_group] == units[start]).all()


@pytest.mark.parametrize("quantizer", [round_to_nearest, kquant.quantize])
def test_a_quantized_weight_is_lowered_with_groups(quantizer: object) -> None:
    found = grouped(quantizer)(matrix(0), SHARED)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.scales.astype(np.float16), found.scales)
    assert attributes(lowered(found))["group_size"] == 128
    free = grouped(quantizer)(matrix(0), FREE)  # type: ignore[arg-type]
    assert attributes(lowered(free))["group_size"] == 0


def lowered(found: Quantized) -> ir.Node:
    assert found.zero_points is not None
    inputs, outputs = found.values.shape
    model = graph(
        f"""g (float[B, S, {inputs}] x) => (float[B, S, {outputs}] y) {{
        w = DequantizeLinear <axis = 0, block_size = 32> (q, s, z) y = MatMul(x, w) }}""",
        q=found.values.astype("uint4"),
        s=found.scales,
        z=found.zero_points.astype("uint4"),
    )
    model.graph.initializers["s"].const_value = Widened(ir.tensor(found.scales.astype(np.float16)))
    assert apply(QuantizedLinearPass(), model) == []
    (node,) = model.graph
    return node


@pytest.mark.parametrize("seed", range(3))
def test_common_units_cost_little(seed: int) -> None:
    weight = matrix(seed, 512, 64)
    errors = [squared(weight, grouped(kquant.quantize)(weight, form), form) for form in (FREE, SHARED)]
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_the_search_is_as_good_as_an_exhaustive_one(seed: int, weighted: bool) -> None:
    weight, form = matrix(seed, 512, 128), dataclasses.replace(FREE, group_size=64)
    rng = np.random.default_rng(seed)
    importance = (rng.lognormal(0, 1, 512) if weighted else np.ones(512)).astype(np.float32)
    free = Scales(*choose_scales(weight, form, importance))
    found = share_units(weight, free, form, importance if weighted else None)
    error = rounding_error(weight, found.scales, found.zero_points, importance).sum()
    assert error < 1.002 * exhaustive(weight, free, importance)


def exhaustive(weight: Floats, free: Scales, importance: Floats) -> float:
    """Return the least error with 37 units per group of two blocks and the multiples beside the free scales.

    Zero points at most one away are tried last.
    """
    farthest = np.maximum(free.zero_points, 15 - free.zero_points)
    most = np.minimum(15, 127 // farthest)
    largest = np.repeat(np.maximum(free.scales[::2], free.scales[1::2]), 2, 0)
    best, scales = np.full(largest[::2].shape, np.inf), free.scales
    for top in 4 + 0.3 * np.arange(37):
        units = largest / top
        sides = [units * np.clip(turn(free.scales / units), 1, most) for turn in (np.floor, np.ceil)]
        below, above = (rounding_error(weight, side, free.zero_points, importance) for side in sides)
        tried, error = np.where(below < above, *sides), np.minimum(below, above)
        total = error[::2] + error[1::2]
        scales = np.where(np.repeat(total < best, 2, 0), tried, scales)
        best = np.minimum(best, total)
    zeros = [np.clip(free.zero_points + move, 0, 15) for move in (-1, 0, 1)]
    return float(np.min([rounding_error(weight, scales, zero, importance) for zero in zeros], 0).sum())


def rounding_error(weight: Floats, scales: Floats, zero_points: Floats, importance: Floats) -> Floats:
    """Return the weighted squared error of each block of 32, [blocks, out]."""
    scale, zero = np.repeat(scales, 32, 0), np.repeat(zero_points, 32, 0)
    off = (np.clip(np.rint(weight / scale) + zero, 0, 15) - zero) * scale - weight
    error: Floats = (importance[:, None] * off**2).reshape(len(scales), 32, -1).sum(1)
    return error


@pytest.mark.parametrize("quantizer", [round_to_nearest, kquant.quantize])
def test_the_result_does_not_depend_on_threads(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(0, 640, 1100)
    alone = grouped(quantizer)(weight, SHARED)
    monkeypatch.setattr(panels, "_SHARED_SIZE", 0)
    for one, other in zip(alone, grouped(quantizer)(weight, SHARED), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(2))
def test_gptq_keeps_its_gain_with_common_units(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = matrix(seed, 256, 64)
    inputs = rng.standard_normal((2048, 256)) @ rng.standard_normal((256, 256)) / 16
    moments = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    errors = [
        squared(weight, gptq.quantize(weight, form, Inputs(moments)), form, moments)
        for form in (FREE, SHARED)
    ]
    rounded = squared(weight, grouped(round_to_nearest)(weight, FREE), FREE, moments)
    assert errors[1] < 1.12 * errors[0]
    assert errors[1] < 0.7 * rounded


def squared(
    weight: Floats, found: Quantized, form: BlockFormat, moments: npt.NDArray[np.float32] | None = None
) -> float:
    off = dequantize(found, form) - weight
    return float(np.einsum("ij,ij->", off, off if moments is None else moments @ off))
