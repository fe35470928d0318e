"""HeadProducts: each head of a row times weights of its own, in any batch and on any processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.graph_opt.lower.products.half_products import OFFSETS, float_tiles
from carryall.graph_opt.lower.products.tiles import LAYOUT
from carryall.providers.base import RunnerConfig
from carryall.providers.targets.cpu import CpuProvider

HEADS = 5


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


def opened(
    folder: Path, weights: npt.NDArray[Any], threads: int = 2, heads: int = HEADS, **changed: int
) -> Any:
    """Return a session of the operator; weights are [heads, outputs, inputs], float32 or bfloat16."""
    outputs, inputs = weights.shape[1:]
    padded = np.pad(weights, ((0, 0), (0, -outputs % 16), (0, 0))).reshape(-1, inputs)
    kind = ir.DataType.from_numpy(weights.dtype)
    tiles = float_tiles(lambda: padded, 8 * weights.dtype.itemsize, inputs, len(padded), by_output=True)
    facts = {
        "layout": LAYOUT,
        "heads": heads,
        "inputs": inputs,
        "outputs": outputs,
        "bits": 8 * weights.dtype.itemsize,
        "offsets": OFFSETS[kind],
        **changed,
    }
    text = ", ".join(f"{name} = {value}" for name, value in facts.items())
    made = graph(
        f"g (float[B, S, W] x) => (float[B, S, V] y) {{ y = carryall.HeadProducts <{text}> (x, t) }}",
        t=tiles.numpy(),
    )
    made.graph.opset_imports["carryall"] = 1
    ir.save(made, folder / "model.onnx")
    config = RunnerConfig(num_threads=threads, options={"kernels": "carryall"})
    return CpuProvider().session(folder / "model.onnx", config)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6, 20), (16, 8), (33, 130), (64, 48)])
def test_results_equal_numpy_in_any_batch(outputs: int, inputs: int, dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(outputs)
    weights = rng.standard_normal((HEADS, outputs, inputs)).astype(dtype)
    x = rng.standard_normal((2, 70, HEADS * inputs)).astype(np.float32)
    one, two = (opened(tmp_path, weights, threads) for threads in (1, 2))
    whole = one.run(None, {"x": x})[0]
    expected = np.einsum("bshi,hoi->bsho", x.reshape(2, 70, HEADS, -1), weights.astype(np.float64))
    np.testing.assert_allclose(
        whole, expected.reshape(whole.shape), rtol=0, atol=1e-5 * np.abs(expected).max()
    )
    for rows in (slice(0, 1), slice(3, 7), slice(9, 33), slice(0, 70)):
        np.testing.assert_array_equal(two.run(None, {"x": x[1:, rows]})[0], whole[1:, rows])
    assert one.run(None, {"x": x[:, :0]})[0].shape == (2, 0, HEADS * outputs)


def test_instruction_sets_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, found = np.random.default_rng(1), []
    weights = rng.standard_normal((HEADS, 40, 24)).astype(np.float32)
    x = rng.standard_normal((1, 9, HEADS * 24)).astype(np.float32)
    for isa in ("", "portable"):
        monkeypatch.setenv("CARRYALL_KERNELS_ISA", isa)
        found.append(opened(tmp_path, weights).run(None, {"x": x})[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": 1}, "layout version 1"),
        ({"heads": 0}, r"heads is not in \[1, 4096\]"),
        ({"inputs": 0}, r"inputs is not in \[1, 2\^24\]"),
        ({"bits": 4, "offsets": 0}, "bits is not|blocks of|weights of heads are floats|block_size is not"),
        ({"offsets": 10}, "not split"),
    ],
)
def test_wrong_attributes_are_refused(changed: dict[str, int], words: str, tmp_path: Path) -> None:
    weights = np.zeros((HEADS, 16, 8), np.float32)
    with pytest.raises(Exception, match=words):
        opened(tmp_path, weights, **changed)


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    weights = np.zeros((HEADS, 16, 8), np.float32)
    with pytest.raises(Exception, match="last axis of x is not heads"):
        opened(tmp_path, weights).run(None, {"x": np.zeros((1, 1, HEADS * 8 + 1), np.float32)})
    with pytest.raises(Exception, match="do not have the bytes of their sizes"):
        opened(tmp_path, weights, heads=HEADS + 1).run(None, {"x": np.zeros((1, 1, 48), np.float32)})
