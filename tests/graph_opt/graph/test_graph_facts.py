"""Facts that are counted in a graph."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import graph

from carryall.graph_opt.graph.graph_facts import has_quantized_weights

W = np.ones((32, 8), np.float32)


@pytest.mark.parametrize(
    "text",
    [
        "y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32> (x, w, scales)",
        "y = com.microsoft.GatherBlockQuantized <block_size = 32> (w, x, scales)",
        "y = MatMulInteger(x, w)",
        "v = DequantizeLinear(w, scales) y = MatMul(x, v)",
    ],
)
def test_products_with_integers_are_quantized(text: str) -> None:
    made = graph(f"g (float[B, 32] x) => (float[B, 8] y) {{ {text} }}", w=W)
    assert has_quantized_weights(made.graph)


def test_products_with_floats_are_not_quantized() -> None:
    text = (
        "g (float[B, 32] x, float[32, 8] v) => (float[B, 8] y, float[B, 8] z) { y = MatMul(x, w) q, s, p = "
    )
    text += "DynamicQuantizeLinear(v) u = DequantizeLinear(q, s, p) z = MatMul(x, u) }"
    assert not has_quantized_weights(graph(text, w=W).graph)
