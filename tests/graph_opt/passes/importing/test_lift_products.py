from __future__ import annotations

import numpy as np
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


def test_batch_axes_stay_where_they_are() -> None:
    text = """g (float[N, H, S, 4] q, float[N, H, T, 4] k) => (float[N, H, S, T] y) {
        y = com.microsoft.FusedMatMul <transBatchA = 1> (q, k) }"""
    assert apply(LiftProductsPass(), graph(text)) == ["it transposes batch axes"]
