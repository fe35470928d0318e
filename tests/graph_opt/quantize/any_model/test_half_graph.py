"""fp16 of any graph: types, overflow, subgraphs, and kernels that are missing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.quantize.any_model.quantize import convert_half
from carryall.graph_opt.quantize.any_model.samples import checked_samples

NET = """g (float[N,3,8,8] x) => (float[N,4,8,8] y, int64[4] z) { c = Conv(x, w, b) r = Relu(c)
    z = Shape(r) t = Exp(r) k = Mul(r, big) y = Add(k, t) }"""
RNG = np.random.default_rng(0)
ARRAYS = {
    "w": RNG.standard_normal((4, 3, 1, 1)).astype(np.float32) * 0.1,
    "b": np.zeros(4, np.float32),
    "big": np.float32(1),
}
FEEDS = [{"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(4)]


def test_weights_and_sums_are_16_bit_and_the_interface_is_float32() -> None:
    model, report = convert_half(graph(NET, **ARRAYS), "fp16", checked_samples(graph(NET).graph, FEEDS))
    assert {value.dtype for value in model.graph.initializers.values()} == {ir.DataType.FLOAT16}
    assert [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)] == [
        ir.DataType.FLOAT,
        ir.DataType.FLOAT,
        ir.DataType.INT64,
    ]
    exponent = next(node for node in model.graph if node.op_type == "Exp")
    assert exponent.inputs[0] is not None
    assert exponent.inputs[0].producer().op_type == "Cast"  # type: ignore[union-attr]
    assert 50 < report.outputs["y"].snr < 100
    assert report.bytes_after * 2 == report.bytes_before


def test_what_overflows_stays_float32() -> None:
    arrays = {**ARRAYS, "big": np.float32(40000)}
    samples = checked_samples(graph(NET).graph, FEEDS)
    model, report = convert_half(graph(NET, **arrays), "fp16", samples)
    assert "k" in report.left_float
    product = next(node for node in model.graph if node.op_type == "Mul")
    assert product.outputs[0].dtype == ir.DataType.FLOAT
    assert report.outputs["y"].snr > 50


def test_values_that_a_branch_reads_stay_float32() -> None:
    text = """g (float[4] x, bool c) => (float[4] y) { a = Relu(x) b = Neg(a)
        y = If<then_branch = t () => (float[4] u) { u = Abs(b) },
               else_branch = e () => (float[4] v) { v = Neg(b) }>(c)
    }"""
    feeds = [{"x": np.ones(4, np.float32), "c": np.array(True)}]
    model, report = convert_half(graph(text), "fp16", checked_samples(graph(text).graph, feeds))
    assert report.outputs["y"].snr == 200
    assert [node.op_type for node in model.graph] == ["Cast", "Relu", "Cast", "Neg", "If"]


def test_bf16_without_kernels_is_refused_with_the_reason() -> None:
    samples = checked_samples(graph(NET).graph, FEEDS)
    with pytest.raises((GraphError, UsageError), match="bf16"):
        convert_half(graph(NET, **ARRAYS), "bf16", samples)
    with pytest.raises(UsageError, match="half precision must be fp16 or bf16, found 'fp8'"):
        convert_half(graph(NET, **ARRAYS), "fp8", samples)


def test_a_weight_beyond_the_range_stays_float32_and_infinity_does_not() -> None:
    feeds = [{"x": np.zeros((1, 3, 8, 8), np.float32)}]
    samples = checked_samples(graph(NET).graph, feeds)
    wide = np.full((4, 3, 1, 1), 1e5, np.float32)
    model, report = convert_half(graph(NET, **{**ARRAYS, "w": wide}), "fp16", samples)
    assert report.left_float["w"] == "it holds numbers beyond the range of FLOAT16"
    assert model.graph.initializers["w"].dtype == ir.DataType.FLOAT
    text = "g (float[N,4] x) => (float[N,4] y) { y = Max(x, low) }"
    lowest = graph(text, low=np.full(4, -np.inf, np.float32))
    model, _ = convert_half(lowest, "fp16", checked_samples(lowest.graph, [{"x": np.ones((1, 4))}]))
    assert model.graph.initializers["low.float16"].dtype == ir.DataType.FLOAT16
