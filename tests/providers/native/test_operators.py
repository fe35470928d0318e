"""The operators in onnxruntime: results, independence of rows, threads and batches, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import graph
from quantized_linear_reference import Weight, grouped_weight, quantized_linear, random_weight

from carryall.errors import GraphError, ProviderUnavailableError
from carryall.graph_opt.lower.products.tiles import LAYOUT
from carryall.providers.base import RunnerConfig
from carryall.providers.ort import ort
from carryall.providers.targets.cpu import CpuProvider

K, N = 160, 70
ATTRIBUTES = (
    "layout = {layout}, inputs = {inputs}, outputs = {outputs}, bits = {bits}, block_size = {block}, "
    "group_size = {group}, offsets = {offsets}"
)


def model(op: str, weight: Weight, text: str, layout: int = LAYOUT, **arrays: Any) -> ir.Model:
    facts = ATTRIBUTES.format(
        layout=layout,
        inputs=weight.inputs,
        outputs=weight.outputs,
        bits=weight.bits,
        block=weight.block,
        group=weight.group_size,
        offsets=weight.offsets,
    )
    made = graph(
        text.replace("OP", f"carryall.{op} <{facts}>"),
        **{"t": weight.tiles(), **arrays},
    )
    made.graph.opset_imports["carryall"] = 1
    return made


LINEAR = f"g (float[B, S, K] x) => (float[B, S, {N}] y) {{ y = OP (x, t) }}"
BIASED = LINEAR.replace("(x, t)", "(x, t, b)")
ROWS = "g (int64[B, S] ids) => (float[B, S, D] y) { y = OP (ids, t) }"


def session(path: Path, made: ir.Model, threads: int = 2) -> Any:
    ir.save(made, path / "model.onnx", external_data="model.data", size_threshold_bytes=1024)
    config = RunnerConfig(num_threads=threads, options={"kernels": "carryall"})
    return CpuProvider().session(path / "model.onnx", config)


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


@pytest.mark.parametrize(
    ("bits", "block", "offsets", "group"), [(4, 32, 1, 0), (8, 128, 0, 0), (4, 64, 2, 0), (4, 32, 1, 128)]
)
def test_any_batch_and_any_number_of_threads_give_the_same_bits(
    tmp_path: Path, bits: int, block: int, offsets: int, group: int
) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, N, K, bits, block, offsets)
    if group:
        weight = grouped_weight(rng, N, K, block, group, offsets)
    bias = rng.standard_normal(N).astype(np.float32)
    x = rng.standard_normal((3, 50, K)).astype(np.float32)
    made = model("QuantizedLinear", weight, BIASED, b=bias)
    one, two = (session(tmp_path, made, threads) for threads in (1, 2))
    whole = one.run(None, {"x": x})[0]
    expected = quantized_linear(x.reshape(-1, K), weight, bias).reshape(whole.shape)
    np.testing.assert_allclose(whole, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(two.run(None, {"x": x})[0], whole)
    for rows in (slice(0, 1), slice(7, 9), slice(10, 23), slice(0, 50)):
        for each in (one, two):
            np.testing.assert_array_equal(each.run(None, {"x": x[1:2, rows]})[0], whole[1:2, rows])


def test_every_instruction_set_can_be_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(np.random.default_rng(1), N, K, 4, 32, 0)
    x = np.random.default_rng(2).standard_normal((1, 5, K)).astype(np.float32)
    made, found = model("QuantizedLinear", weight, LINEAR), []
    for isa in ("", "portable"):
        monkeypatch.setenv("CARRYALL_KERNELS_ISA", isa)
        found.append(session(tmp_path, made).run(None, {"x": x})[0])
    np.testing.assert_array_equal(found[0], found[1])
    monkeypatch.setenv("CARRYALL_KERNELS_ISA", "mmx")
    with pytest.raises(
        ProviderUnavailableError, match=r"no instruction set of this processor; it supports .*portable"
    ):
        session(tmp_path, made)


@pytest.mark.parametrize(("bits", "block", "offsets"), [(4, 32, 1), (8, 64, 0), (4, 16, 2)])
def test_rows_of_an_embedding(tmp_path: Path, bits: int, block: int, offsets: int) -> None:
    weight = random_weight(np.random.default_rng(3), 33, K, bits, block, offsets)
    ids = np.array([[0, 32, 5], [16, 15, 31]])
    (found,) = session(tmp_path, model("QuantizedRows", weight, ROWS)).run(None, {"ids": ids})
    np.testing.assert_allclose(found, weight.floats()[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 33])
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path: Path, wrong: int) -> None:
    weight = random_weight(np.random.default_rng(3), 33, K, 4, 32, 0)
    opened = session(tmp_path, model("QuantizedRows", weight, ROWS))
    with pytest.raises(ort.runtime_errors(), match=rf"id {wrong} is not in \[0, 33\)"):
        opened.run(None, {"ids": np.array([[0, wrong]])})


def test_another_layout_is_refused_with_its_version(tmp_path: Path) -> None:
    weight = random_weight(np.random.default_rng(4), N, K, 4, 32, 0)
    with pytest.raises(GraphError, match="layout version 1; these kernels read version 2"):
        session(tmp_path, model("QuantizedLinear", weight, LINEAR, layout=1))


def test_weights_and_inputs_of_wrong_sizes_are_refused(tmp_path: Path) -> None:
    weight = random_weight(np.random.default_rng(4), N, K, 4, 32, 0)
    x = np.ones((1, 2, K), np.float32)
    short = model("QuantizedLinear", weight, LINEAR, t=weight.tiles()[:-1])
    with pytest.raises(ort.runtime_errors(), match=r"the weights have \d+ bytes, not the \d+"):
        session(tmp_path, short).run(None, {"x": x})
    opened = session(tmp_path, model("QuantizedLinear", weight, LINEAR))
    with pytest.raises(ort.runtime_errors(), match="last axis of x"):
        opened.run(None, {"x": x[..., 1:]})
    few = model("QuantizedLinear", weight, BIASED, b=np.ones(N - 1, np.float32))
    with pytest.raises(ort.runtime_errors(), match="bias"):
        session(tmp_path, few).run(None, {"x": x})


def test_no_rows_give_no_rows(tmp_path: Path) -> None:
    weight = random_weight(np.random.default_rng(4), N, K, 4, 32, 0)
    opened = session(tmp_path, model("QuantizedLinear", weight, LINEAR))
    empty: npt.NDArray[np.float32] = opened.run(None, {"x": np.ones((1, 0, K), np.float32)})[0]
    assert empty.shape == (1, 0, N)


def gate(path: Path, threads: int = 2) -> Any:
    made = graph("g (float[B, S, W] x) => (float[B, S, H] y) { y = carryall.SiluAndMul(x) }")
    made.graph.opset_imports["carryall"] = 1
    return session(path, made, threads)


@pytest.mark.parametrize("width", [1, 16, 50, 1536])
def test_the_gate_of_a_mlp(tmp_path: Path, width: int) -> None:
    x = (np.random.default_rng(5).standard_normal((2, 40, 2 * width)) * 4).astype(np.float32)
    x[0, 0, 0], x[1, 39, -1] = 200, -200
    one, two = gate(tmp_path, 1), gate(tmp_path, 2)
    whole = one.run(None, {"x": x})[0]
    exact = x.astype(np.float64)
    expected = exact[..., :width] / (1 + np.exp(-exact[..., :width])) * exact[..., width:]
    np.testing.assert_allclose(whole, expected, rtol=2e-6, atol=1e-30)
    np.testing.assert_array_equal(two.run(None, {"x": x})[0], whole)
    np.testing.assert_array_equal(one.run(None, {"x": x[1:, 7:9]})[0], whole[1:, 7:9])


def test_a_gate_without_two_halves_is_refused(tmp_path: Path) -> None:
    opened = gate(tmp_path)
    with pytest.raises(ort.runtime_errors(), match="two halves"):
        opened.run(None, {"x": np.ones((1, 2, 7), np.float32)})
    assert opened.run(None, {"x": np.ones((1, 0, 8), np.float32)})[0].shape == (1, 0, 4)


def test_the_gate_gives_nan_for_nan(tmp_path: Path) -> None:
    x = np.ones((1, 1, 64), np.float32)
    x[0, 0, 3], x[0, 0, 40] = np.nan, np.inf
    (found,) = gate(tmp_path).run(None, {"x": x})
    assert np.isnan(found[0, 0, 3])
    assert np.isinf(found[0, 0, 8])
    assert np.isfinite(np.delete(found[0, 0], [3, 8])).all()
