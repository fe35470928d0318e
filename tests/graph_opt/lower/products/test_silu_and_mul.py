"""The gate behind merged products becomes one operator, exactly where its halves have no other use."""

from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.products.silu_and_mul import SiluAndMulPass

HEAD = "g (float[B, S, 12] x) => (float[B, S, 6] y) {"
SPLIT = "g, u = Split <axis = -1> (x, sizes)"
SILU = "s = com.microsoft.QuickGelu <alpha = 1.0> (g)"


@pytest.mark.parametrize("product", ["Mul(s, u)", "Mul(u, s)"])
def test_a_gate_of_two_halves(product: str) -> None:
    before = graph(f"{HEAD} {SPLIT} {SILU} y = {product} }}", sizes=np.array([6, 6]))
    assert apply(SiluAndMulPass(), before) == []
    assert_same(before, graph(f"{HEAD} y = carryall.SiluAndMul(x) }}"))


@pytest.mark.parametrize(
    "body",
    [
        f"{SPLIT} s = com.microsoft.QuickGelu <alpha = 1.702> (g) y = Mul(s, u)",
        f"{SPLIT} {SILU} y = Add(s, u)",
        f"{SPLIT} {SILU} t = Mul(s, u) y = Add(t, u)",
        f"{SPLIT} {SILU} t = Mul(s, u) y = Add(t, s)",
        f"{SPLIT} {SILU} y = Mul(s, s)",
        f"u, g = Split <axis = -1> (x, sizes) {SILU} y = Mul(s, u)",
        f"g, u = Split <axis = 1> (x, sizes) {SILU} y = Mul(s, u)",
    ],
)
def test_other_graphs_are_left_alone(body: str) -> None:
    made, same = (graph(f"{HEAD} {body} }}", sizes=np.array([6, 6])) for _ in range(2))
    apply(SiluAndMulPass(), made)
    assert_same(made, same)


def test_halves_of_different_sizes_are_left_alone() -> None:
    text = f"{HEAD} {SPLIT} {SILU} y = Mul(s, u) }}"
    made, same = (graph(text, sizes=np.array([4, 8])) for _ in range(2))
    apply(SiluAndMulPass(), made)
    assert_same(made, same)
