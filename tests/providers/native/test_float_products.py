"""Products with floats of 16 and 32 bits: near float64, the same bits everywhere."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from half_weight import HALF_KINDS, KINDS, HalfWeight, SplitWeight, half_weight
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import isas, linear

from carryall.providers.native.library import load

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "kind": st.sampled_from(sorted(KINDS)),
        "rows": st.one_of(st.integers(1, 14), st.integers(12, 40), st.integers(126, 131)),
        "outputs": st.integers(1, 70),
        "inputs": st.one_of(st.integers(1, 40), st.integers(120, 140), st.integers(250, 400)),
        "biased": st.booleans(),
        "row_step": st.one_of(st.integers(1, 30), st.just(200)),
        "tile_step": st.integers(1, 6),
        "shift": st.sampled_from([0, 4, 20, 60]),
    }
)
SPLIT, HIGH, ROUNDED = FORMS = ((32, 10), (16, 10), (16, 13))  # bits and offsets


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES)
def test_products_are_exact_but_for_the_sums_and_the_same_bits_everywhere(
    library: Path, case: dict[str, int]
) -> None:
    rng = np.random.default_rng(case["seed"])
    weight = half_weight(ir.DataType(case["kind"]), case["inputs"], case["outputs"], case["seed"])
    x = rng.standard_normal((case["rows"], weight.inputs)).astype(np.float32)
    bias = rng.standard_normal(weight.outputs).astype(np.float32) if case["biased"] else None
    expected = linear(library, "portable", x, weight, bias)
    for isa in isas(library):
        steps = (case["row_step"], case["tile_step"])
        result = linear(library, isa, x, weight, bias, steps=steps, shift=case["shift"])
        np.testing.assert_array_equal(result, expected, isa)
    added = 0 if bias is None else bias.astype(np.float64)
    reference = x.astype(np.float64) @ weight.values + added
    bound = np.abs(x).astype(np.float64) @ np.abs(weight.values) + np.abs(added)
    assert (np.abs(expected - reference) <= 140 * 2.0**-24 * bound + 1e-30).all()  # sums of 128 at most


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(library: Path, kind: ir.DataType) -> None:
    weight = half_weight(kind, 300, 50, 1)
    x = np.random.default_rng(1).standard_normal((140, 300)).astype(np.float32)
    for isa in isas(library):
        whole = linear(library, isa, x, weight)
        for first, last in ((0, 1), (3, 5), (7, 30), (29, 30), (100, 140)):
            np.testing.assert_array_equal(linear(library, isa, x[first:last], weight), whole[first:last])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES, st.sampled_from(FORMS))
def test_split_weights_are_multiplied_as_floats_or_in_parts(
    library: Path, case: dict[str, int], form: tuple[int, int]
) -> None:
    """AMX leaves out the product of low parts, 2^-16 of a product at most, and rounds low parts, 2^-17.

    Rounded rows lose 2^-9 of each element, and nothing else but the order of sums.
    """
    rng = np.random.default_rng(case["seed"])
    given = rng.standard_normal((case["inputs"], case["outputs"])).astype(np.float32)
    weight = SplitWeight(given, *form)
    np.testing.assert_allclose(
        weight.values, weight.given, rtol=2.0 ** (-17 if form == SPLIT else -8), atol=0
    )
    x = rng.standard_normal((case["rows"], weight.inputs)).astype(np.float32)
    bias = rng.standard_normal(weight.outputs).astype(np.float32) if case["biased"] else None
    reference = x.astype(np.float64) @ weight.values + (0 if bias is None else bias.astype(np.float64))
    bound = np.abs(x).astype(np.float64) @ np.abs(weight.values) + (0 if bias is None else np.abs(bias))
    expected = linear(library, "portable", x, weight, bias)
    assert (np.abs(expected - reference) <= 140 * 2.0**-24 * bound).all()
    for isa in isas(library):
        steps = (case["row_step"], case["tile_step"])
        result = linear(library, isa, x, weight, bias, steps=steps, shift=case["shift"])
        if isa == "amx":
            if form == ROUNDED:
                rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64) @ weight.values
                added = 0 if bias is None else bias.astype(np.float64)
                assert (np.abs(result - rounded - added) <= 2.0 * case["inputs"] * 2.0**-24 * bound).all()
            else:
                assert (np.abs(result - reference) <= 1.6 * 2.0**-16 * bound).all()
            np.testing.assert_array_equal(result, linear(library, isa, x, weight, bias))
        else:
            np.testing.assert_array_equal(result, expected, isa)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "scale"), [(300, 1.0), (700, 1.0), (300, 2.0**-64)])
def test_a_row_of_split_weights_does_not_depend_on_the_rows_beside_it(
    library: Path, form: tuple[int, int], inputs: int, scale: float
) -> None:
    """Nor where products are denormal numbers, which AMX takes for zeros."""
    rng = np.random.default_rng(1)
    weight = SplitWeight(scale * rng.standard_normal((inputs, 50)).astype(np.float32), *form)
    x = scale * rng.standard_normal((140, inputs)).astype(np.float32)
    bias = scale**2 * rng.standard_normal(50).astype(np.float32)
    for isa in isas(library):
        whole = linear(library, isa, x, weight, bias)
        for first, last in ((0, 1), (3, 5), (7, 30), (29, 30), (10, 43), (100, 140)):
            part = linear(library, isa, x[first:last], weight, bias)
            np.testing.assert_array_equal(part, whole[first:last])
    row = np.zeros(weight.inputs, np.float32)
    tiles = weight.tiles()
    for index in (0, 17, 49):
        load(library).carryall_read_row(
            ctypes.c_void_p(tiles.ctypes.data),
            *map(ctypes.c_int64, (weight.inputs, weight.outputs, weight.bits, 1, weight.offsets, 0, index)),
            ctypes.c_void_p(row.ctypes.data),
        )
        np.testing.assert_array_equal(row, weight.values[:, index])


@pytest.mark.parametrize("form", FORMS)
def test_an_infinite_activation_of_split_weights_is_not_hidden(library: Path, form: tuple[int, int]) -> None:
    x = np.ones((9, 40), np.float32)
    x[2, 3], x[5, 37] = np.inf, np.nan
    for isa in isas(library):
        result = linear(library, isa, x, SplitWeight(np.ones((40, 20), np.float32), *form))
        assert not np.isfinite(result[[2, 5]]).any(), isa
        assert (np.delete(result, (2, 5), axis=0) == 40).all(), isa


@pytest.mark.parametrize("kind", HALF_KINDS)
def test_rows_of_an_embedding_keep_every_bit(library: Path, kind: ir.DataType) -> None:
    every = (
        np.arange(1 << 16, dtype=np.uint16).view(HALF_KINDS[kind][0]).astype(np.float32).reshape(1 << 8, -1)
    )
    weight = HalfWeight(every, kind)
    tiles, row = weight.tiles(), np.zeros(weight.inputs, np.float32)
    for index in range(weight.outputs):
        load(library).carryall_read_row(
            ctypes.c_void_p(tiles.ctypes.data),
            *map(ctypes.c_int64, (weight.inputs, weight.outputs, 16, 1, weight.offsets, 0, index)),
            ctypes.c_void_p(row.ctypes.data),
        )
        np.testing.assert_array_equal(row, weight.values[:, index])


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_weight_and_a_nan_reach_the_result(library: Path, kind: ir.DataType) -> None:
    values = np.ones((20, 16), np.float32)
    values[3, 4], values[5, 6] = np.inf, np.nan
    for isa in isas(library):
        result = linear(library, isa, np.ones((9, 20), np.float32), HalfWeight(values, kind))
        assert np.isposinf(result[:, 4]).all(), isa
        assert np.isnan(result[:, 6]).all(), isa
        assert (np.delete(result, (4, 6), axis=1) == 20).all(), isa
