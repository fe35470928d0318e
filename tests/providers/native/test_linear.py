"""The kernels of every instruction set against NumPy, bit by bit against each other, and their refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import isas, linear
from quantized_linear_reference import Weight, grouped_weight, quantized_linear, random_weight

from carryall.graph_opt.lower.products.tiles import MINIMA

SHAPES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "rows": st.one_of(st.integers(1, 14), st.integers(12, 70)),  # AMX begins at 8, 12 or 16
        "outputs": st.integers(1, 70),
        "inputs": st.one_of(
            st.integers(1, 150).map(lambda half: 2 * half), st.sampled_from([64, 192, 256, 1600, 8800])
        ),  # AMX unpacks 1,536 or 2,048 inputs at a time
        "bits": st.sampled_from([4, 8]),
        "block": st.sampled_from([16, 32, 64, 128, 256]),
        "offsets": st.integers(0, 2),
        "group": st.sampled_from([0, 64, 128, 192, 256]),
        "biased": st.booleans(),
        "row_step": st.one_of(st.integers(1, 30), st.just(100)),
        "tile_step": st.integers(1, 6),
        "shift": st.sampled_from([0, 4, 20, 60]),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES)
def test_every_instruction_set_gives_the_bits_of_the_reference(library: Path, case: dict[str, int]) -> None:
    rng = np.random.default_rng(case["seed"])
    weight = _weight(rng, case)
    x = (rng.standard_normal((case["rows"], case["inputs"])) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    bias = rng.standard_normal(case["outputs"]).astype(np.float32) if case["biased"] else None
    expected = linear(library, "portable", x, weight, bias)
    for isa in isas(library):
        steps, shift = (case["row_step"], case["tile_step"]), case["shift"]
        found = linear(library, isa, x, weight, bias, steps=steps, shift=shift)
        np.testing.assert_array_equal(found, expected, isa)
    reference = quantized_linear(x, weight, bias)
    largest = np.abs(reference).max()
    np.testing.assert_allclose(expected, reference, rtol=1e-6, atol=1e-6 * largest)


def _weight(rng: np.random.Generator, case: dict[str, int]) -> Weight:
    """Return a grouped weight if the case can have one."""
    outputs, inputs, block, group = (case[name] for name in ("outputs", "inputs", "block", "group"))
    if group >= block and group % block == 0 and case["bits"] == 4 and case["offsets"] != MINIMA:
        return grouped_weight(rng, outputs, inputs, block, group, case["offsets"])
    return random_weight(rng, outputs, inputs, case["bits"], block, case["offsets"])


def test_a_row_does_not_depend_on_the_rows_beside_it(library: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((30, 192)).astype(np.float32)
    for weight in (random_weight(rng, 50, 192, 4, 32, 1), grouped_weight(rng, 50, 192, 32, 128, 1)):
        for isa in isas(library):
            whole = linear(library, isa, x, weight)
            for first, last in ((0, 1), (3, 5), (7, 30), (29, 30)):
                np.testing.assert_array_equal(linear(library, isa, x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("rows", [15, 21, 49])
@pytest.mark.parametrize("inputs", [832, 1664])
def test_tiles_that_are_unpacked_in_several_parts(library: Path, rows: int, inputs: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    weights = [grouped_weight(rng, 45, inputs, 32, group, 1) for group in (64, 128)]
    weights += [random_weight(rng, 45, inputs, 4, 128, 1), random_weight(rng, 45, inputs, 8, 64, 0)]
    for weight in weights:
        expected = linear(library, "portable", x, weight)
        np.testing.assert_allclose(expected, quantized_linear(x, weight, None), rtol=1e-5, atol=1e-5)
        for isa in isas(library):
            for steps in ((100, 1), (100, 3), (30, 2)):
                np.testing.assert_array_equal(linear(library, isa, x, weight, steps=steps), expected, isa)


@pytest.mark.parametrize("outputs", [155, 160])
@pytest.mark.parametrize("inputs", [2048, 4672])
def test_more_rows_and_tiles_than_a_part_has(library: Path, inputs: int, outputs: int) -> None:
    """AMX keeps sums of 256 rows and 8 tiles from one part of the inputs to the next.

    It writes whole lines of results past the caches, so of 160 outputs that begin at a line, not of 155.
    """
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((275, inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    for weight in (
        grouped_weight(rng, outputs, inputs, 32, 64, 1),
        random_weight(rng, outputs, inputs, 4, 16, 2),
    ):
        expected = linear(library, "portable", x, weight, bias)
        np.testing.assert_allclose(expected, quantized_linear(x, weight, bias), rtol=1e-5, atol=1e-5)
        for isa in isas(library):
            for shift in (0, 16):
                found = linear(library, isa, x, weight, bias, steps=(300, 10), shift=shift)
                np.testing.assert_array_equal(found, expected, isa)


def test_the_largest_integer_sums_do_not_overflow(library: Path) -> None:
    """All activations 127, all values at the end of their range: 256 * 127 * 255 in 8 bits."""
    for bits, extreme in ((4, 0), (4, 15), (8, 0), (8, 255)):
        for sign in (1, -1):
            weight = random_weight(np.random.default_rng(0), 17, 512, bits, 256, 1)
            weight.values[...] = extreme
            weight.zero_points[...] = (1 << bits) - 1 - extreme  # type: ignore[index]
            x = np.full((2, 512), sign, np.float32)
            for isa in isas(library):
                found = linear(library, isa, x, weight)
                np.testing.assert_allclose(found, x @ weight.floats().T, rtol=1e-5)


def test_activations_round_like_the_reference_near_halves(library: Path) -> None:
    x = np.array([[127, *(k / 2 for k in range(-253, 254, 17)), 1]], np.float32)
    weight = random_weight(np.random.default_rng(2), 16, x.shape[1], 8, 32, 0)
    for isa in isas(library):
        np.testing.assert_allclose(
            linear(library, isa, x, weight), quantized_linear(x, weight, None), rtol=1e-6
        )


def test_zeros_tiny_and_values_that_are_not_finite(library: Path) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 20, 64, 4, 32, 2)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    x[0], x[1, :32], x[2, 40], x[3, 3] = 0, 1e-38, np.inf, np.nan
    for isa in isas(library):
        found = linear(library, isa, x, weight)
        assert np.isnan(found[2]).all()
        assert np.isnan(found[3]).all()
        np.testing.assert_array_equal(found[0], 0)
        np.testing.assert_allclose(found[[1, 4]], quantized_linear(x, weight, None)[[1, 4]], rtol=1e-5)


def test_the_result_is_near_the_product_of_floats(library: Path) -> None:
    """Rounding activations to int8 per block of 32 costs 0.7 % of the result's norm at most."""
    rng = np.random.default_rng(4)
    for bits, offsets in ((4, 0), (4, 1), (4, 2), (8, 0), (8, 1)):
        weight = random_weight(rng, 128, 1024, bits, 32, offsets)
        x = rng.standard_normal((4, 1024)).astype(np.float32)
        exact = x @ weight.floats().T
        found = linear(library, isas(library)[0], x, weight)
        assert np.linalg.norm(found - exact) < 0.007 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bits": 5}, "bits is not 4 or 8"),
        ({"block": 48}, "block_size is not 16, 32, 64, 128 or 256"),
        ({"block": 512}, "block_size"),
        ({"offsets": 14}, "offsets is not 0 to 13"),
        ({"offsets": 7, "group": 64}, "no type of GGUF files has these bits"),
        ({"offsets": 5}, "weights of 16 bits have the offsets 5, 6, 10 or 13"),
        ({"bits": 16}, "weights of 16 bits have the offsets 5, 6, 10 or 13"),
        ({"bits": 32, "offsets": 13}, "those of 32 bits 9 or 10"),
        ({"bits": 24, "offsets": 10}, "those of 32 bits 9 or 10"),
        ({"bits": 16, "offsets": 6}, "weights of 16 and 32 bits have blocks of 1 and no groups"),
        (
            {"bits": 16, "offsets": 6, "block": 1, "group": 64},
            "weights of 16 and 32 bits have blocks of 1 and no groups",
        ),
        ({"bits": 16, "offsets": 5, "block": 1}, "wrong number of bytes"),
        ({"group": 96}, "group_size is not 0, 64, 128, 192 or 256"),
        ({"group": 64, "bits": 8}, "these weights have no groups"),
        ({"group": 64, "block": 128}, "these weights have no groups"),
        ({"inputs": 0}, "inputs is not in"),
        ({"outputs": 1 << 40}, "outputs is not in"),
        ({"outputs": 17}, "wrong number of bytes"),
        ({"bytes": 64}, "wrong number of bytes"),
    ],
)
def test_wrong_sizes_are_refused_before_any_memory_is_read(
    library: Path, wrong: dict[str, int], message: str
) -> None:
    weight = random_weight(np.random.default_rng(5), 16, 64, 4, 32, 0)
    with pytest.raises(ValueError, match=message):
        linear(library, "portable", np.ones((1, 64), np.float32), weight, sizes=wrong)


def test_an_unknown_instruction_set_is_refused(library: Path) -> None:
    weight = random_weight(np.random.default_rng(5), 16, 64, 4, 32, 0)
    with pytest.raises(ValueError, match="no such instruction set"):
        linear(library, "sse", np.ones((1, 64), np.float32), weight)
