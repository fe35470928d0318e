"""Blocked weights with a short last block; onnxruntime-genai's builder writes 344 inputs in blocks of 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.graph_opt.lower.kernels import CPU, DIRECTML
from carryall.graph_opt.lower.products.arithmetic_dequantize import ArithmeticDequantizePass
from carryall.graph_opt.lower.products.dequantize_weights import DequantizeWeightsPass, is_signed
from carryall.graph_opt.lower.products.matmul_nbits import QuantizedWeightsPass
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.importing.lift_weights import LiftWeightsPass

ort = pytest.importorskip("onnxruntime")
INPUTS, OUTPUTS, BLOCK, BLOCKS = 44, 6, 16, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, INPUTS)).astype(np.float32)
FORMS = [(4, False), (4, True), (8, False), (8, True)]


def product(bits: int, *, points: bool) -> ir.Model:
    """Return a kernel's product whose last block has random values beyond the inputs."""
    rng = np.random.default_rng(bits)
    given = {
        "b": rng.integers(0, 256, (OUTPUTS, BLOCKS, BLOCK * bits // 8)).astype(np.uint8),
        "scales": rng.random((OUTPUTS, BLOCKS)).astype(np.float32) * 0.5**bits,
        "points": rng.integers(0, 256, (OUTPUTS, -(-BLOCKS * bits // 8))).astype(np.uint8),
    }
    attributes = f"K = {INPUTS}, N = {OUTPUTS}, bits = {bits}, block_size = {BLOCK}, accuracy_level = 1"
    text = f"""g (float[M, {INPUTS}] x) => (float[M, {OUTPUTS}] y) {{
        y = com.microsoft.MatMulNBits <{attributes}> (x, b, scales{", points" * points}) }}"""
    return graph(text, **given)


def kernel(model: ir.Model, path: Path) -> npt.NDArray[Any]:
    ir.save(model, path / "model.onnx")
    session = ort.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


@pytest.mark.parametrize(("bits", "points"), FORMS)
def test_a_short_last_block_is_kept(bits: int, points: bool, tmp_path: Path) -> None:
    expected = kernel(product(bits, points=points), tmp_path)
    model = product(bits, points=points)
    assert apply(LiftWeightsPass(), model) == []
    (node,) = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert [value.shape for value in node.inputs if value is not None][:2] == [
        (INPUTS, OUTPUTS),
        (BLOCKS, OUTPUTS),
    ]
    np.testing.assert_allclose(evaluate(model, {"x": X})[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lowering", [ArithmeticDequantizePass(), DequantizeWeightsPass()])
@pytest.mark.parametrize(("bits", "points"), FORMS)
def test_targets_without_short_blocks(bits: int, points: bool, lowering: GraphPass, tmp_path: Path) -> None:
    expected = kernel(product(bits, points=points), tmp_path)
    model = product(bits, points=points)
    assert apply(LiftWeightsPass(), model) == apply(lowering, model) == []
    assert not [node for node in model.graph if node.op_type == "DequantizeLinear"]
    np.testing.assert_allclose(evaluate(model, {"x": X})[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "points"), FORMS)
def test_lowering_restores_the_product(bits: int, points: bool, tmp_path: Path) -> None:
    expected = kernel(product(bits, points=points), tmp_path)
    model = product(bits, points=points)
    assert apply(LiftWeightsPass(), model) == apply(QuantizedWeightsPass(CPU), model) == []
    (node,) = list(model.graph)
    assert (node.op_type, node.attributes["K"].as_int()) == ("MatMulNBits", INPUTS)
    node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    np.testing.assert_allclose(kernel(model, tmp_path), expected, rtol=1e-5, atol=1e-5)


def test_tensorrt_supports_only_whole_blocks() -> None:
    model = product(4, points=False)
    apply(LiftWeightsPass(), model)
    (node,) = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert not is_signed(node, [ir.DataType.INT4])


def test_directml_takes_whole_blocks_only() -> None:
    model = product(4, points=False)
    apply(LiftWeightsPass(), model)
    reasons = apply(QuantizedWeightsPass(DIRECTML), model)
    assert reasons == ["the target's MatMulNBits needs whole blocks, not 44 of 16"]
    assert "MatMul" in [node.op_type for node in model.graph]
