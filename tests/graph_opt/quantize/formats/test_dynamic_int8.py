"""Dynamic int8: the standard form and the kernel's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, evaluate, graph
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner, SlotGraphRunner
from carryall.graph_opt.graph.graph_facts import count_operators
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.lower.products.dynamic_int8 import DynamicProductsPass
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.integer_products import quantize_columns

RNG = np.random.default_rng(0)
V, W = (RNG.standard_normal((32, n)).astype(np.float32) for n in (8, 6))
FORM = BlockFormat(bits=8, block_size=16)
TWO = """g (float[B, 32] x) => (float[B, 8] y, float[B, 6] z)
    { m = MatMul(x, v) y = Relu(m) p = MatMul(x, w) n = Add(p, b) z = Relu(n) }"""


def quantize(model: ir.Model, **options: Any) -> list[str]:
    return apply(DynamicQuantizationPass(FORM, **options), model)


def test_products_are_near_the_float_ones_and_share_their_input() -> None:
    model, x = graph(TWO, v=V, w=W, b=np.ones(6, np.float32)), RNG.standard_normal((5, 32)).astype(np.float32)
    exact = evaluate(graph(TWO, v=V, w=W, b=np.ones(6, np.float32)), {"x": x})
    assert quantize(model) == []
    assert count_operators(model)["DynamicQuantizeLinear"] == 1
    assert count_operators(model)["MatMulInteger"] == 2
    assert model.graph.initializers["v.values"].dtype == ir.DataType.INT8
    for result, expected in zip(evaluate(model, {"x": x}), exact, strict=True):
        error = np.abs(result - expected).max()
        assert 0 < error < 0.02 * np.abs(expected).max()


def test_an_excluded_weight_becomes_weight_only() -> None:
    model = graph(TWO, v=V, w=W, b=np.ones(6, np.float32))
    quantize(model, exclude=["w"])
    assert {"v.values", "w.values", "w.scales"} <= set(model.graph.initializers)
    assert count_operators(model)["MatMulInteger"] == count_operators(model)["DequantizeLinear"] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_weights_are_named(bad: float) -> None:
    broken = W.copy()
    broken[3, 2] = bad
    model = graph("g (float[B, 32] x) => (float[B, 6] y) { m = MatMul(x, w) y = Relu(m) }", w=broken)
    quantize(model)
    tensor = model.graph.initializers["w.values"].const_value
    assert tensor is not None
    with pytest.raises(GraphError, match="weight w cannot be quantized: it holds NaN or infinity"):
        tensor.numpy()


def test_columns_of_zeros_and_rounding() -> None:
    matrix = np.array([[0, 127, -2.54], [0, -63.4, 1.0]], np.float32)
    values, scales = quantize_columns(matrix)
    np.testing.assert_array_equal(values, [[0, 127, -127], [0, -63, 50]])
    np.testing.assert_allclose(scales, [0, 1, 0.02], rtol=1e-6)


def test_products_of_one_input_become_one_kernel_call() -> None:
    model = graph(TWO.replace("n = Add(p, b) z = Relu(n)", "z = Relu(p)"), v=V, w=W)
    quantize(model)
    assert apply(DynamicProductsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["DynamicQuantizeMatMul", "Split", "Relu", "Relu"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_zero_points_of_weights_stay(dtype: Any) -> None:
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    points = rng.integers(info.min, info.max, (2, 5)).astype(dtype)
    weights = rng.integers(info.min // 2, info.max // 2, (2, 32, 5)).astype(dtype)
    text = """g (float[B, 32] x) => (float[B, 5] y, float[B, 5] z) { q, s, point = DynamicQuantizeLinear(x)
        a = MatMulInteger(q, v, point, vz) b = Cast<to = 1>(a) c = Mul(s, vs) y = Mul(b, c)
        d = MatMulInteger(q, w, point, wz) e = Cast<to = 1>(d) f = Mul(s, ws) z = Mul(e, f) }"""
    parts = zip("vw", weights, points, (np.float32(0.1), rng.random(5).astype(np.float32)), strict=True)
    tensors = {
        f"{name}{kind}": array
        for name, *arrays in parts
        for kind, array in zip(("", "z", "s"), arrays, strict=True)
    }
    model = graph(text, **tensors)
    x = rng.standard_normal((3, 32)).astype(np.float32)
    expected = evaluate(model, {"x": x})
    assert apply(DynamicProductsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["DynamicQuantizeMatMul", "Split"]
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for found, right in zip(session.run(None, {"x": x}), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-3)


def test_unsupported_products_are_explained() -> None:
    text = """g (float[B, 32] x) => (float[B, 32] y)
        { q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }"""
    model = graph(text)
    assert apply(DynamicProductsPass(), model) == ["the quantized input is not multiplied with a weight"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"head_dim": 16}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {})],
)
def test_lowering_keeps_the_results(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = export_model(write_tiny(family, tmp_path / "checkpoint", **overrides))
    report = pipeline.run(model, [DynamicQuantizationPass(FORM)], debug=True)[1]
    assert report.refusals == []
    ir.save(model, tmp_path / "portable.onnx")
    pipeline.run(model, slot_passes(SlotOptions(context_length=64)), debug=True)
    assert count_operators(model)["com.microsoft::DynamicQuantizeMatMul"] == 8  # qkv, o, gate and up, down
    assert "MatMulInteger" not in count_operators(model)
    ir.save(model, tmp_path / "lowered.onnx")
    first = PortableRunner(tmp_path / "portable.onnx")
    second = SlotGraphRunner(tmp_path / "lowered.onnx", slots=1, max_length=64)
    for count in (11, 1, 5):
        tokens = RNG.integers(0, 256, count)
        left, right = first.forward({0: tokens})[0], second.forward({0: tokens})[0]
        np.testing.assert_allclose(left, right, atol=3e-2 * float(np.abs(left).max()))
