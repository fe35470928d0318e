"""Facts that are counted in a graph."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import graph

from carryall.graph_opt.graph.graph_facts import has_quantized_weights, quantized_bits

W = np.ones((32, 8), np.int8)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (4, "y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32> (x, w, scales)"),
        (8, "y = com.microsoft.MatMulNBits <K = 32, N = 8, bits = 8, block_size = 32> (x, w, scales)"),
        (4, "y = com.microsoft.GatherBlockQuantized <block_size = 32> (w, x, scales)"),
        (8, "y = MatMulInteger(x, w)"),
        (8, "v = DequantizeLinear(w, scales) y = MatMul(x, v)"),
    ],
)
def test_products_with_integers_are_quantized(bits: int, text: str) -> None:
    made = graph(f"g (float[B, 32] x) => (float[B, 8] y) {{ {text} }}", w=W)
    assert has_quantized_weights(made.graph)
    assert quantized_bits(made.graph) == {bits}


def test_products_with_floats_are_not_quantized() -> None:
    text = (
        "g (float[B, 32] x, float[32, 8] v) => (float[B, 8] y, float[B, 8] z) { y = MatMul(x, w) q, s, p = "
    )
    text += "DynamicQuantizeLinear(v) u = DequantizeLinear(q, s, p) z = MatMul(x, u) }"
    assert not has_quantized_weights(graph(text, w=W.astype(np.float32)).graph)
