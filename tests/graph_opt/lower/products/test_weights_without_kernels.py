"""Weights and products without a kernel on the target are written with other operators and equal results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, evaluate, graph

from carryall.errors import GraphError
from carryall.graph_opt.lower.older_opset import OlderOpsetPass
from carryall.graph_opt.lower.products.dequantize_weights import DequantizeWeightsPass, is_signed
from carryall.graph_opt.lower.products.weight_only_products import WeightOnlyProductsPass

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 32)).astype(np.float32)
BLOCKED = """g (float[3, 32] x) => (float[3, 6] y) {
    w = DequantizeLinear<axis = 0, block_size = 16>(q, s%s)
    y = MatMul(x, w)
}"""
DYNAMIC = """g (float[3, K] x) => (float[3, 6] y) {
    xq, xs, xz = DynamicQuantizeLinear(x)
    product = MatMulInteger(xq, w, xz)
    whole = Cast<to = 1>(product)
    scale = Mul(xs, ws)
    scaled = Mul(whole, scale)
    y = Add(scaled, b)
}"""


def integers(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    low, high = (-8, 8) if dtype == ml_dtypes.int4 else (0, 16) if dtype == ml_dtypes.uint4 else (-100, 100)
    return RNG.integers(low, high, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("zero_points", [False, True])
def test_blocked_weights_become_floats(dtype: Any, zero_points: bool) -> None:
    tensors = {"q": integers(dtype, (32, 6)), "s": RNG.random((2, 6)).astype(np.float32)}
    if zero_points:
        tensors["z"] = integers(dtype, (2, 6))
    model = graph(BLOCKED % (", z" if zero_points else ""), **tensors)
    (expected,) = evaluate(model, {"x": X})
    assert apply(DequantizeWeightsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["MatMul"]
    np.testing.assert_allclose(evaluate(model, {"x": X})[0], expected, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_per_column_and_per_tensor(axis: int) -> None:
    for scales in (RNG.random((32, 6)[axis]), np.array(0.25)):
        text = BLOCKED.replace("axis = 0, block_size = 16", f"axis = {axis}") % ""
        model = graph(text, q=integers(np.int8, (32, 6)), s=scales.astype(np.float32))
        (expected,) = evaluate(model, {"x": X})
        apply(DequantizeWeightsPass(), model)
        np.testing.assert_allclose(evaluate(model, {"x": X})[0], expected, rtol=1e-6)


def test_only_symmetric_weights_stay_for_tensorrt() -> None:
    scales = np.ones((2, 6), np.float32)
    for dtype, zeros, stays in (
        (np.int8, None, True),
        (ml_dtypes.int4, 0, True),
        (ml_dtypes.int4, 1, False),
        (ml_dtypes.uint4, 8, False),
    ):
        tensors = {"q": integers(dtype, (32, 6)), "s": scales}
        if zeros is not None:
            tensors["z"] = np.full((2, 6), zeros).astype(dtype)
        model = graph(BLOCKED % ("" if zeros is None else ", z"), **tensors)
        types = (ir.DataType.INT8, ir.DataType.INT4)
        for allowed, kept in ((types, stays), (types[:1], stays and dtype == np.int8)):
            again = model.clone()
            apply(DequantizeWeightsPass(unless=lambda node, allowed=allowed: is_signed(node, allowed)), again)  # type: ignore[misc]
            assert ("DequantizeLinear" in [node.op_type for node in again.graph]) is kept


def test_computed_scales_are_left_alone() -> None:
    text = BLOCKED.replace("x)", "x, float[2, 6] s)") % ""
    model = graph(text, q=integers(np.int8, (32, 6)))
    apply(DequantizeWeightsPass(), model)
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul"]


@pytest.mark.parametrize(("rows", "block"), [(32, 32), (48, 16), (24, 0)])
def test_dynamic_products_become_weight_only(rows: int, block: int) -> None:
    """Activations are not rounded; the weights have exactly their stored values."""
    x, w = RNG.standard_normal((3, rows)).astype(np.float32), integers(np.int8, (rows, 6))
    scales, bias = RNG.random(6).astype(np.float32), RNG.random(6).astype(np.float32)
    model = graph(DYNAMIC, w=w, ws=scales, b=bias)
    rounded = evaluate(model, {"x": x})[0]
    assert apply(WeightOnlyProductsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul", "Add"]
    size = model.graph[0].attributes.get("block_size")
    assert (size.as_int() if size else 0) == block
    got = evaluate(model, {"x": x})[0]
    np.testing.assert_allclose(got, x @ (w * scales) + bias, rtol=1e-5, atol=1e-4)
    assert 0 < np.abs(got - rounded).max() < 0.05 * np.abs(got).max()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("rows", [32, 24])
@pytest.mark.parametrize("shape", [(6,), (1,), ()])
def test_zero_points_of_dynamic_products_stay(dtype: Any, rows: int, shape: tuple[int, ...]) -> None:
    info = np.iinfo(dtype)
    w = RNG.integers(info.min, info.max + 1, (rows, 6)).astype(dtype)
    zeros, scales = RNG.integers(info.min, info.max + 1, shape).astype(dtype), RNG.random(shape)
    x, bias = RNG.standard_normal((3, rows)).astype(np.float32), RNG.random(6).astype(np.float32)
    text = DYNAMIC.replace("w, xz)", "w, xz, wz)")
    model = graph(text, w=w, ws=scales.astype(np.float32), wz=zeros, b=bias)
    assert apply(WeightOnlyProductsPass(), model) == []
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "MatMul", "Add"]
    expected = x @ ((w.astype(np.float64) - zeros.astype(np.float64)) * scales) + bias
    np.testing.assert_allclose(evaluate(model, {"x": x})[0], expected, rtol=1e-5, atol=1e-3)


def test_an_operator_that_the_older_opset_lacks_is_named() -> None:
    model = graph("g (float[2, 4] x, float[4] w) => (float[2, 4] y) { y = RMSNormalization(x, w) }")
    with pytest.raises(GraphError, match=r"RMSNormalization .*opset 21 does not have this operator"):
        OlderOpsetPass(21)(model)
    model = graph("g (float[2, 4] x) => (float16[2, 4] y) { y = Cast<to = 10, saturate = 1>(x) }")
    with pytest.raises(GraphError, match="does not have the attribute saturate"):
        OlderOpsetPass(18)(model)
    assert apply(OlderOpsetPass(21), model) == []
    assert model.graph.opset_imports[""] == 21
    assert isinstance(model, ir.Model)
