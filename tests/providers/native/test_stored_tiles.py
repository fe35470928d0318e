"""Tiles of GGUF blocks: the bytes of the file, llama.cpp's values, the same bits on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from native_kernels import isas, linear
from stored_weight import StoredWeight, stored_linear, stored_weight
from tiny_gguf import ONE

from carryall.errors import CheckpointError
from carryall.graph_opt.lower.products.stored_tiles import FORMS
from carryall.providers.native.packing import tile_packer

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "kind": st.sampled_from(sorted(FORMS)),
        "rows": st.one_of(st.integers(1, 14), st.integers(12, 40)),
        "outputs": st.integers(1, 70),
        "stretches": st.integers(1, 5),
        "biased": st.booleans(),
        "row_step": st.one_of(st.integers(1, 30), st.just(100)),
        "tile_step": st.integers(1, 6),
        "shift": st.sampled_from([0, 4, 20, 60]),
    }
)


# Its terms nearly cancel.
CANCELLING: dict[str, Any] = {
    "seed": 384855881,
    "kind": "Q4_K",
    **dict.fromkeys(("rows", "outputs", "stretches", "tile_step"), 1),
    "biased": False,
    "row_step": 100,
    "shift": 0,
}


def weight_of(library: Path, case: dict[str, int]) -> StoredWeight:
    form = FORMS[str(case["kind"])]
    inputs = case["stretches"] * (form.group or form.block)
    return stored_weight(library, str(case["kind"]), case["outputs"], inputs, case["seed"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES)
@example(CANCELLING)
def test_values_are_those_of_the_file_and_products_have_the_same_bits(
    library: Path, case: dict[str, int]
) -> None:
    weight, rng = weight_of(library, case), np.random.default_rng(case["seed"])
    np.testing.assert_array_equal(weight.read_rows(), weight.floats())
    x = (rng.standard_normal((case["rows"], weight.inputs)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    bias = rng.standard_normal(weight.outputs).astype(np.float32) if case["biased"] else None
    expected = linear(library, "portable", x, weight, bias)
    steps, shift = (case["row_step"], case["tile_step"]), case["shift"]
    for isa in isas(library):
        found = linear(library, isa, x, weight, bias, steps=steps, shift=shift)
        np.testing.assert_array_equal(found, expected, isa)
    reference = stored_linear(x, weight, bias)
    terms = np.abs(x) @ np.abs(weight.floats()).T  # a sum of terms that cancel has the errors of the terms
    np.testing.assert_allclose(expected, reference, rtol=1e-6, atol=1e-6 * terms.max())


@pytest.mark.parametrize("kind", FORMS)
def test_a_row_does_not_depend_on_the_rows_beside_it(library: Path, kind: str) -> None:
    weight = stored_weight(library, kind, 50, 512, 1)
    x = np.random.default_rng(1).standard_normal((30, 512)).astype(np.float32)
    for isa in isas(library):
        whole = linear(library, isa, x, weight)
        for first, last in ((0, 1), (3, 5), (7, 30), (29, 30)):
            np.testing.assert_array_equal(linear(library, isa, x[first:last], weight), whole[first:last])


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [16, 40])
def test_long_rows_in_several_parts_have_the_same_bits(library: Path, kind: str, rows: int) -> None:
    weight = stored_weight(library, kind, 40, 8192 + 256, 6)
    x = np.random.default_rng(6).standard_normal((rows, weight.inputs)).astype(np.float32)
    expected = linear(library, "portable", x, weight)
    for isa in isas(library):
        np.testing.assert_array_equal(linear(library, isa, x, weight), expected, isa)


@pytest.mark.parametrize("kind", FORMS)
def test_a_tile_has_the_bytes_of_the_file(library: Path, kind: str) -> None:
    weight = stored_weight(library, kind, 32, 2048, 2)
    more = 1.015 if kind == "IQ4_XS" else 1.005  # integer scales of 8 bits, in the file of 6
    assert weight.tiles().nbytes <= more * weight.rows.nbytes


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F, 0x80])
def test_the_largest_sums_do_not_overflow(library: Path, kind: str, byte: int) -> None:
    """Blocks of one repeated byte: all values, scales and minima at an end of their range."""
    weight = stored_weight(library, kind, 17, 512, 3)
    weight.rows[...] = byte
    size = weight.rows.shape[1] // (512 // (weight.group_size or 32))
    halves = {**ONE, "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))
    blocks = weight.rows.reshape(-1, size)
    for offset in halves:
        blocks[:, offset : offset + 2] = np.array([0.5], np.float16).view(np.uint8)
    for sign in (1, -1):
        x = np.full((20, 512), sign, np.float32)
        expected = stored_linear(x, weight, None)
        for isa in isas(library):
            np.testing.assert_allclose(linear(library, isa, x, weight), expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "MXFP4"])
@pytest.mark.parametrize("scale", [0.0, -1.5, 6e-8, 6.1e-5, 65504.0])
def test_every_finite_scale_is_read_exactly(library: Path, kind: str, scale: float) -> None:
    weight = stored_weight(library, kind, 16, 256, 4)
    size = weight.rows.shape[1] // (256 // (weight.group_size or 32))
    blocks, at = weight.rows.reshape(-1, size), ONE.get(kind, (0,))[0]
    blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    _assert_read_exactly(library, weight)


def _assert_read_exactly(library: Path, weight: StoredWeight) -> None:
    np.testing.assert_array_equal(weight.read_rows(), weight.floats())
    x = np.random.default_rng(4).standard_normal((20, 256)).astype(np.float32)
    expected = linear(library, "portable", x, weight)
    for isa in isas(library):
        np.testing.assert_array_equal(linear(library, isa, x, weight), expected, isa)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 127, 128, 200, 250])
def test_every_power_of_two_is_read_exactly(library: Path, exponent: int) -> None:
    weight = stored_weight(library, "MXFP4", 16, 256, 4)
    weight.rows.reshape(-1, 17)[:, 0] = exponent
    _assert_read_exactly(library, weight)


def test_a_power_of_two_that_is_no_number_is_refused(library: Path) -> None:
    weight = stored_weight(library, "MXFP4", 20, 64, 5)
    weight.rows[18, 17] = 255
    with pytest.raises(CheckpointError, match="scale is infinite or no number"):
        weight.tiles()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_scale_that_is_no_number_is_refused(library: Path, value: float) -> None:
    weight = stored_weight(library, "Q4_K", 20, 256, 5)
    weight.rows[18, 2:4] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="scale is infinite or no number"):
        weight.tiles()


def test_rows_of_several_parts_are_one_weight(library: Path) -> None:
    weight = stored_weight(library, "Q6_K", 50, 256, 6)
    parts = [weight.rows[:7], weight.rows[7:40], weight.rows[40:]]
    np.testing.assert_array_equal(tile_packer(library)(weight.form, parts, 256), weight.tiles())


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": 511},
        {"bits": 7},
        {"block": 64},
        {"group": 64},
        {"offsets": 5},
        {"offsets": 0},
        {"bytes": 1},
    ],
)
def test_sizes_of_no_type_are_refused(library: Path, wrong: dict[str, int]) -> None:
    weight = stored_weight(library, "Q4_K", 16, 512, 7)
    with pytest.raises(ValueError, match=r"inputs|bits|block|group|offsets|bytes"):
        linear(library, "portable", np.ones((1, 512), np.float32), weight, sizes=wrong)
