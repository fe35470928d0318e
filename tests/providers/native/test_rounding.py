"""Native rounding of weights gives the bits of the algorithms in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import isas

from carryall import export
from carryall.errors import GraphError
from carryall.graph_opt.quantize.algorithms import gptq
from carryall.graph_opt.quantize.algorithms.arithmetic import Arithmetic
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat, Floats, Quantized, Quantizer
from carryall.graph_opt.quantize.algorithms.grouped import starting_scales
from carryall.graph_opt.quantize.algorithms.inputs import Inputs
from carryall.graph_opt.quantize.algorithms.sweep import SweepScales, sweep_panel
from carryall.graph_opt.quantize.weight_methods import UNCALIBRATED
from carryall.providers.native import rounding
from carryall.providers.native.rounding import BlockRounding

FORMS = (
    BlockFormat(bits=4, block_size=32, symmetric=False, group_size=64),
    BlockFormat(bits=4, block_size=16, symmetric=False, group_size=64),
    BlockFormat(bits=4, block_size=32, symmetric=False),
    BlockFormat(bits=4, block_size=128),
    BlockFormat(bits=8, block_size=64),
    BlockFormat(bits=8, block_size=16, symmetric=False),
)
CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "form": st.sampled_from(FORMS),
        "algorithm": st.sampled_from(["rtn", "kquant"]),
        "blocks": st.integers(1, 9),
        "outputs": st.one_of(st.integers(2, 40), st.integers(500, 530)),  # NumPy's panels end at 512
        "order": st.sampled_from("CF"),
        "kind": st.sampled_from(["normal", "tails", "zeros", "positive", "steps", "tiny"]),
        "exponent": st.integers(-30, 4),
    }
)


def matrix_of(case: dict[str, Any]) -> Floats:
    rng = np.random.default_rng(case["seed"])
    shape = case["blocks"] * case["form"].block_size, case["outputs"]
    matrix = rng.standard_normal(shape)
    if case["kind"] == "tails":
        matrix = rng.standard_t(2, shape)
    elif case["kind"] == "zeros":
        matrix *= rng.random(shape) < 0.05
    elif case["kind"] == "positive":
        matrix = np.abs(matrix) + 1
    elif case["kind"] == "steps":  # halves between levels
        matrix = rng.integers(-15, 16, shape) / 2
    scale = 2.0**-140 if case["kind"] == "tiny" else 2.0 ** case["exponent"]
    return np.asarray(matrix * scale, np.float32, order=case["order"])


def assert_same(found: Quantized, expected: Quantized, what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, what)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES)
def test_every_instruction_set_gives_the_bits_of_numpy(library: Path, case: dict[str, Any]) -> None:
    matrix, form, algorithm = matrix_of(case), case["form"], case["algorithm"]
    expected = UNCALIBRATED[algorithm](matrix, form)
    for isa in isas(library):
        assert_same(BlockRounding(library, algorithm, isa)(matrix, form), expected, isa)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES)
def test_starting_scales_are_the_bits_of_numpy(library: Path, case: dict[str, Any]) -> None:
    matrix, form = matrix_of(case), case["form"]
    importance = np.random.default_rng(case["seed"]).lognormal(0, 2, len(matrix)).astype(np.float32)
    expected = starting_scales(matrix, form, importance)
    for isa in isas(library):
        found = BlockRounding(library, "rtn", isa).starting_scales(matrix, form, importance)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other, isa)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (37, 5), (128, 33), (128, 700)])
@pytest.mark.parametrize("form", FORMS[:5:4], ids=str)
def test_a_sweep_gives_the_bits_of_numpy(library: Path, form: BlockFormat, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    wide = rng.standard_normal((inputs, inputs + 7)).astype(np.float32)
    matrix = (wide @ wide.T)[:, :inputs]
    left = 3 * rng.standard_normal((inputs, outputs)).astype(np.float32)
    levels = np.zeros_like(left)
    scales = rng.uniform(0.05, 1, (3, outputs)).astype(np.float32)
    scales[1, 0] = 0  # a block of zeros
    zeros = rng.integers(0, 8, scales.shape).astype(np.float32)
    grid = SweepScales(scales, zeros, rng.integers(0, 3, inputs))
    expected = left.copy(), levels.copy()
    sweep_panel(*expected, grid, matrix, form)
    for isa in isas(library):
        found = left.copy(), levels.copy()
        BlockRounding(library, "rtn", isa).sweep(*found, grid, matrix, form)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other, isa)


def test_gptq_gives_the_bits_of_numpy(library: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 160)).astype(np.float32)
    weight, known = rng.standard_normal((160, 1100)).astype(np.float32), Inputs(x.T @ x)
    kernels = BlockRounding(library, "rtn")
    native = Arithmetic(kernels, kernels.starting_scales, kernels.sweep)
    assert_same(gptq.quantize(weight, FORMS[0], known, native), gptq.quantize(weight, FORMS[0], known), "")


def test_a_panel_of_too_many_inputs_is_refused(library: Path) -> None:
    left = np.ones((129, 4), np.float32)
    grid = SweepScales(np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32), np.zeros(129, np.int64))
    matrix = np.eye(129, dtype=np.float32)
    with pytest.raises(GraphError, match="size"):
        BlockRounding(library, "rtn").sweep(left, left.copy(), grid, matrix, FORMS[0])


def test_many_tasks_give_the_bits_of_numpy(library: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((192, 1000)).astype(np.float32)
    found = BlockRounding(library, "kquant")(matrix, FORMS[0])
    assert_same(found, UNCALIBRATED["kquant"](matrix, FORMS[0]), "")


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("algorithm", ["rtn", "kquant"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("wrong", "error"), [(np.nan, "NaN or infinity"), (-np.inf, "NaN or infinity"), (3e38, "too large")]
)
def test_weights_without_levels_are_refused_as_in_numpy(
    library: Path, algorithm: str, form: BlockFormat, wrong: float, error: str
) -> None:
    matrix = np.ones((256, 300), np.float32)
    matrix[200, 290] = wrong
    if algorithm == "rtn" and wrong == 3e38:
        matrix[200:202, 290] = 3e38, -3e38  # its range exceeds float32
    quantizers: list[Quantizer] = [BlockRounding(library, algorithm, isa) for isa in isas(library)]
    quantizers.append(UNCALIBRATED[algorithm])
    for quantizer in quantizers:
        with pytest.raises(GraphError, match=error):
            quantizer(matrix, form)


def test_a_matrix_of_part_blocks_is_refused(library: Path) -> None:
    with pytest.raises(GraphError, match="size"):
        BlockRounding(library, "rtn")(np.ones((40, 8), np.float32), BlockFormat())


@pytest.mark.long
@pytest.mark.parametrize("method", ["int4-fast", "int8-fast"])
def test_a_package_has_the_same_bytes_with_and_without_kernels(
    library: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "find_library", lambda: library)
    export("demo", tmp_path / "native", quantize=method)
    monkeypatch.setattr(rounding, "find_library", lambda: None)
    export("demo", tmp_path / "numpy", quantize=method)
    for path in (tmp_path / "numpy").glob("*.onnx*"):
        assert path.read_bytes() == (tmp_path / "native" / path.name).read_bytes(), path.name
