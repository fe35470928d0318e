from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.importing.lift_norms import LiftNormsPass

W, B = np.linspace(0.5, 2, 8).astype(np.float32), np.linspace(-1, 1, 8).astype(np.float32)
SIGNATURE = "g (float[N, S, 8] x, float[N, S, 8] r) => (float[N, S, 8] y, float[N, S, 8] z)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "y, a, b, z = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (x, r, w)",
            "z = Add(x, r) y = RMSNormalization <axis = -1, epsilon = 1e-6> (z, w)",
        ),
        (
            "y, a, b, z = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (x, r, w, bias)",
            "s = Add(x, r) z = Add(s, bias) y = RMSNormalization <axis = -1, epsilon = 1e-6> (z, w)",
        ),
        (
            "y, a, b, z = com.microsoft.SkipLayerNormalization <epsilon = 1e-6> (x, r, w, bias)",
            "z = Add(x, r) y = LayerNormalization <axis = -1, epsilon = 1e-6> (z, w, bias)",
        ),
        (
            "z = Add(x, r) y = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 1e-6> (z, w)",
            "z = Add(x, r) y = RMSNormalization <axis = -1, epsilon = 1e-6> (z, w)",
        ),
    ],
    ids=["skip", "skip with bias", "skip layer norm", "simplified"],
)
def test_kernels_become_standard_operators(before: str, after: str) -> None:
    model = graph(f"{SIGNATURE} {{ {before} }}", w=W, bias=B)
    assert apply(LiftNormsPass(), model) == []
    assert_same(model, graph(f"{SIGNATURE} {{ {after} }}", w=W, bias=B))


def test_statistics_that_are_read_keep_the_kernel() -> None:
    text = """g (float[N, S, 8] x, float[N, S, 8] r) => (float[N, S, 1] m) {
        y, m = com.microsoft.SkipLayerNormalization (x, r, w, bias) }"""
    model = graph(text, w=W, bias=B)
    assert apply(LiftNormsPass(), model) == ["its mean or variance output is used"]
    assert [node.op_type for node in model.graph] == ["SkipLayerNormalization"]


def test_summands_that_broadcast_keep_the_kernel() -> None:
    text = """g (float[N, S, 8] x, float[1, S, 8] r) => (float[N, S, 8] y) {
        y = com.microsoft.SkipSimplifiedLayerNormalization (x, r, w) }"""
    assert apply(LiftNormsPass(), graph(text, w=W)) == ["the shapes of its summands differ or are unknown"]
