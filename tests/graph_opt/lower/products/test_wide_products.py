"""Products in int8 with one scale per row: close to the stored weights, with independent rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.lower.products.wide_products import WideProductsPass
from carryall.graph_opt.quantize.formats.integer_products import quantize_columns
from carryall.providers.ort.ort import CPU, open_session

K, N, BLOCK = 64, 10, 16
RNG = np.random.default_rng(0)
VALUES = RNG.integers(-8, 8, (K, N))
SCALES = RNG.uniform(0.5, 1.5, (K // BLOCK, N)).astype(np.float32)
X = RNG.standard_normal((3, 5, K)).astype(np.float32)
LINEAR = f"g (float[B, S, {K}] x) => (float[B, S, {N}] y)"
PRODUCT = f"{{ w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s) y = MatMul(x, w) }}"
Floats = npt.NDArray[np.float32]


def lowered() -> ir.Model:
    model = graph(f"{LINEAR} {PRODUCT}", q=VALUES.astype(ml_dtypes.int4), s=SCALES)
    assert apply(WideProductsPass(), model) == []
    return model


def run(model: ir.Model, x: Floats) -> Floats:
    content = ir.to_proto(model).SerializeToString()
    result: Floats = open_session(content, CPU).run(None, {"x": x})[0]
    return result


def by_hand(x: Floats) -> Floats:
    """Return the result of the same arithmetic in float64."""
    levels, columns = quantize_columns(VALUES * np.repeat(SCALES, BLOCK, axis=0))
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    rounded = np.clip(np.rint(x / largest * 127), -128, 127)
    product: Floats = (rounded @ levels.astype(np.float64) * columns * largest / 127).astype(np.float32)
    return product


def test_results_follow_the_definition() -> None:
    model = lowered()
    assert sorted(node.op_type for node in model.graph) == sorted(
        ["Abs", "ReduceMax", "Max", "Div", "QuantizeLinear", "MatMulIntegerToFloat", "Mul"]
    )
    found = run(model, X)
    np.testing.assert_allclose(found, by_hand(X), rtol=1e-5, atol=1e-4)
    exact = X @ (VALUES * np.repeat(SCALES, BLOCK, axis=0)).astype(np.float32)
    assert np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact)


def test_rows_are_independent() -> None:
    huge = X.copy()
    huge[:, 0] *= 1e4
    np.testing.assert_array_equal(run(lowered(), huge)[:, 1:], run(lowered(), X)[:, 1:])
    np.testing.assert_array_equal(run(lowered(), X[1:2, 2:3])[0, 0], run(lowered(), X)[1, 2])


def test_a_row_of_zeros_gives_zeros() -> None:
    rows = X.copy()
    rows[1, 1] = 0
    found = run(lowered(), rows)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[1, 1], 0)


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("{ y = MatMul(x, f) }", []),
        (
            "{ w = DequantizeLinear <axis = 1, block_size = 5> (q, t) y = MatMul(x, w) }",
            ["it is blocked along its outputs"],
        ),
    ],
)
def test_other_weights_stay(body: str, reasons: list[str]) -> None:
    floats = np.ones((K, N), np.float32)
    model = graph(
        f"{LINEAR} {body}", q=VALUES.astype(ml_dtypes.int4), f=floats, t=np.ones((K, 2), np.float32)
    )
    assert apply(WideProductsPass(), model) == reasons
    assert "MatMul" in {node.op_type for node in model.graph}


def test_8_bit_weights_beside_4_bit_ones_stay() -> None:
    first = f"v = DequantizeLinear <axis = 0, block_size = {BLOCK}> (p, s) z = MatMul(x, v)"
    second = f"w = DequantizeLinear <axis = 0, block_size = {BLOCK}> (q, s) y = MatMul(x, w)"
    text = f"g (float[B, S, {K}] x) => (float[B, S, {N}] y, float[B, S, {N}] z) {{ {first} {second} }}"
    model = graph(text, p=VALUES.astype(np.int8), q=VALUES.astype(ml_dtypes.int4), s=SCALES)
    assert apply(WideProductsPass(), model) == ["its weight has 8 bits, others have 4"]
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("MatMul"), kinds.count("MatMulIntegerToFloat")) == (1, 1)
