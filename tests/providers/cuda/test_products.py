"""carryall's MatMulNBits, over the emulator and onnxruntime's kernel of the CPU: which computes, and what."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from cuda_emulator import EmulatedCudaOnCpu

from carryall.errors import CarryallError

INNER, COLUMNS, GROUP = 96, 24, 32
Array = npt.NDArray[Any]


def session(group: int = GROUP, bits: int = 4, *, zeros: bool = False) -> Any:
    """Open a graph of one product, whose weights are inputs too."""
    points = f", uint8[{COLUMNS}, {(INNER // group + 1) // 2}] zeros" if zeros else ""
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21, "carryall": 1]> g
        (float16[rows, {INNER}] x, uint8[{COLUMNS}, {INNER // group}, {group // 2}] weights,
         float16[{COLUMNS}, {INNER // group}] scales{points}) => (float16[rows, {COLUMNS}] y)
        {{ y{", whole" * zeros} = carryall.MatMulNBits
           <K = {INNER}, N = {COLUMNS}, bits = {bits}, block_size = {group}>
           (x, weights, scales{", zeros" * zeros}) }}"""
    )
    return EmulatedCudaOnCpu()._small_session(0, ir.to_proto(model).SerializeToString())


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "own"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 1), (65, 1), (128, 1), (129, 0), (0, 0)]
)
def test_rows_decide_which_kernel_computes_and_both_agree_with_numpy(rows: int, own: int) -> None:
    rng = np.random.default_rng(rows)
    groups = INNER // GROUP
    weights = rng.integers(0, 256, (COLUMNS, groups, GROUP // 2)).astype(np.uint8)
    scales = (rng.random((COLUMNS, groups)) * 0.02).astype(np.float16)
    x = rng.normal(0, 1, (rows, INNER)).astype(np.float16)
    whole = np.stack([weights & 15, weights >> 4], axis=-1).reshape(COLUMNS, groups, GROUP).astype(np.float64)
    exact = ((whole - 8) * scales[..., None]).reshape(COLUMNS, INNER)
    opened, emulator = session(), EmulatedCudaOnCpu().emulator
    before = emulator.launches
    (y,) = opened.run(None, {"x": x, "weights": weights, "scales": scales})
    assert emulator.launches == before + own
    np.testing.assert_allclose(y.astype(np.float64), x.astype(np.float64) @ exact.T, rtol=4e-3, atol=4e-3)


@pytest.mark.long
@pytest.mark.parametrize(("rows", "own"), [(0, 0), (1, 1), (16, 1), (32, 1), (128, 1), (129, 2), (300, 3)])
def test_with_zero_points_all_rows_are_carryalls(rows: int, own: int) -> None:
    """CPUs have no product of float16, so many rows are computed in parts here."""
    rng = np.random.default_rng(rows)
    groups = INNER // GROUP
    nibbles = rng.integers(0, 16, (COLUMNS, INNER)).astype(np.uint8)
    points = rng.integers(0, 16, (COLUMNS, groups + 1)).astype(np.uint8)  # of 3 groups: one is padding
    scales = (rng.random((COLUMNS, groups)) * 0.02).astype(np.float16)
    x = rng.normal(0, 1, (rows, INNER)).astype(np.float16)
    steps = nibbles.astype(np.float64) - points[:, :groups].repeat(GROUP, axis=1)
    exact = steps * scales.repeat(GROUP, axis=1).astype(np.float64)
    feeds = {
        "x": x,
        "weights": (nibbles[:, ::2] | nibbles[:, 1::2] << 4).reshape(COLUMNS, groups, GROUP // 2),
        "scales": scales,
        "zeros": points[:, ::2] | points[:, 1::2] << 4,
    }
    opened, emulator = session(zeros=True), EmulatedCudaOnCpu().emulator
    before = emulator.launches
    (y,) = opened.run(None, feeds)
    assert emulator.launches == before + own
    np.testing.assert_allclose(y.astype(np.float64), x.astype(np.float64) @ exact.T, rtol=4e-3, atol=6e-3)


@pytest.mark.long
@pytest.mark.parametrize("changed", [{"bits": 8}, {"group": 8}])
def test_what_the_kernel_does_not_read_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CarryallError, match="not those of carryall's MatMulNBits"):
        session(changed.get("group", GROUP), changed.get("bits", 4))


@pytest.mark.long
def test_weights_of_another_size_are_refused() -> None:
    feeds = {
        "x": np.zeros((20, INNER), np.float16),
        "weights": np.zeros((COLUMNS, INNER // GROUP, GROUP // 2), np.uint8),
        "scales": np.zeros((COLUMNS - 1, INNER // GROUP), np.float16),
    }
    with pytest.raises(Exception, match="scales"):  # onnxruntime's own class
        session().run(None, feeds)
