from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.passes.importing.lift_weights import LiftWeightsPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes

ort = pytest.importorskip("onnxruntime")
N, K, BLOCK = 6, 32, 16
RNG = np.random.default_rng(0)
SCALES = RNG.random((N, K // BLOCK)).astype(np.float32)
FORMS = {
    "4 bits": (4, ""),
    "4 bits, zero points": (4, ", points4"),
    "8 bits": (8, ""),
    "8 bits, zero points": (8, ", points8"),
}
GIVEN = {
    "b4": RNG.integers(0, 256, (N, K // BLOCK, BLOCK // 2)).astype(np.uint8),
    "b8": RNG.integers(0, 256, (N, K // BLOCK, BLOCK)).astype(np.uint8),
    "scales": SCALES,
    "points4": RNG.integers(0, 256, (N, 1)).astype(np.uint8),
    "points8": RNG.integers(0, 256, (N, 2)).astype(np.uint8),
}


def product(form: str) -> ir.Model:
    bits, points = FORMS[form]
    attributes = f"K = {K}, N = {N}, bits = {bits}, block_size = {BLOCK}, accuracy_level = 1"
    text = f"""g (float[M, {K}] x) => (float[M, {N}] y) {{
        y = com.microsoft.MatMulNBits <{attributes}> (x, b{bits}, scales{points}) }}"""
    return graph(text, **GIVEN)


def result(
    model: ir.Model, path: Path, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    ir.save(model, path)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0], np.float32)


@pytest.mark.parametrize("form", list(FORMS))
def test_blocked_products(tmp_path: Path, form: str) -> None:
    x = RNG.standard_normal((3, K)).astype(np.float32)
    expected = result(product(form), tmp_path / "a.onnx", x)
    model = product(form)
    assert apply(LiftWeightsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(result(model, tmp_path / "b.onnx", x), expected, rtol=1e-4, atol=1e-4)


def in_defaults(model: ir.Model, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Any:
    content = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("kept", [(), (4, 8)])
def test_products_of_floats_stay_exact_in_other_graphs(form: str, kept: tuple[int, ...]) -> None:
    """Under onnxruntime's defaults too, which round x where DequantizeLinear is next to MatMul."""
    x = RNG.standard_normal((3, K)).astype(np.float32)
    expected = in_defaults(product(form), x)
    model, _ = run(product(form), model_passes(kept_products=kept))
    operators = {node.op_type for node in model.graph}
    assert operators == ({"MatMulNBits"} if kept else {"DequantizeLinear", "Transpose", "MatMul"})
    np.testing.assert_allclose(in_defaults(model, x), expected, rtol=1e-5, atol=1e-5)


TIED = f"""g (int64[M] input_ids) => (float[M, {N}] y) {{ flat = Reshape(b4, shape)
    x = com.microsoft.GatherBlockQuantized <bits = 4, block_size = {BLOCK}, quantize_axis = 1>
        (flat, input_ids, scales)
    y = com.microsoft.MatMulNBits <K = {K}, N = {N}, bits = 4, block_size = {BLOCK}, accuracy_level = 1>
        (x, b4, scales) }}"""


def test_an_embedding_and_its_head_share_one_tensor(tmp_path: Path) -> None:
    given = GIVEN | {"shape": np.array([N, K // 2])}
    ids = np.array([0, 5, 2])
    expected = result(graph(TIED, **given), tmp_path / "a.onnx", ids)
    model = graph(TIED, **given)
    assert apply(LiftWeightsPass(), model) == []
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("DequantizeLinear") == 1
    assert "Gemm" in kinds
    np.testing.assert_allclose(result(model, tmp_path / "b.onnx", ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (23, "its last block is partial, and it is an embedding or has an odd number of inputs"),
        (40, "its weight holds 32 inputs instead of 40"),
    ],
)
def test_a_weight_of_another_size_keeps_the_kernel(inputs: int, reason: str) -> None:
    text = f"""g (float[M, {inputs}] x) => (float[M, {N}] y) {{
        y = com.microsoft.MatMulNBits <K = {inputs}, N = {N}, bits = 4, block_size = 16> (x, b4, scales) }}"""
    assert apply(LiftWeightsPass(), graph(text, **GIVEN)) == [reason]
