from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.importing.lift_products import LiftProductsPass

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_transposed_weight_is_stored_transposed() -> None:
    text = "g (float[N, S, 4] x) => (float[N, S, 3] y) { %s }"
    model = graph(text % "y = com.microsoft.FusedMatMul <transB = 1> (x, w)", w=W)
    assert apply(LiftProductsPass(), model) == []
    assert_same(model, graph(text % "y = MatMul(x, wt)", wt=W.T))


def test_activations_are_transposed_and_scaled() -> None:
    text = "g (float[N, H, S, 4] q, float[N, H, T, 4] k) => (float[N, H, S, T] y) { %s }"
    model = graph(text % "y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (q, k)")
    apply(LiftProductsPass(), model)
    after = "t = Transpose <perm = [0, 1, 3, 2]> (k) p = MatMul(q, t) y = Mul(p, half)"
    assert_same(model, graph(text % after, half=np.float32(0.5)))


def test_batch_axes_keep_their_positions() -> None:
    text = """g (float[N, H, S, 4] q, float[N, H, T, 4] k) => (float[N, H, S, T] y) {
        y = com.microsoft.FusedMatMul <transBatchA = 1> (q, k) }"""
    assert apply(LiftProductsPass(), graph(text)) == ["it transposes batch axes"]


def computed(model: ir.Model, feed: dict[str, Any]) -> Any:
    """The result by onnxruntime, without its fusions."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("operands", ["", ", zeros", ", zeros, bias"])
def test_products_of_rounded_inputs_are_those_of_onnxruntime(dtype: Any, operands: str) -> None:
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    tensors = {
        "w": rng.integers(info.min // 2, info.max // 2, (8, 5)).astype(dtype),  # sums of AVX2 do not saturate
        "ws": rng.random(5).astype(np.float32),
        "zeros": rng.integers(info.min, info.max, 5).astype(dtype),
        "bias": rng.random(5).astype(np.float32),
    }
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    dynamic = f"y = com.microsoft.DynamicQuantizeMatMul (x, w, ws{operands})"
    static = (
        "q, s, z = DynamicQuantizeLinear (x)"
        f"y = com.microsoft.MatMulIntegerToFloat (q, w, s, ws, z{operands})"
    )
    for text in (dynamic, static):
        model = graph(f"g (float[2, 3, 8] x) => (float[2, 3, 5] y) {{ {text} }}", **tensors)
        expected = computed(model, {"x": x})
        assert apply(LiftProductsPass(), model) == []
        assert not any(node.domain for node in model.graph)
        np.testing.assert_allclose(computed(model, {"x": x}), expected, rtol=1e-5, atol=1e-4)
