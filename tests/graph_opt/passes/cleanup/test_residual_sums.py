from __future__ import annotations

import numpy as np
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.cleanup.residual_sums import BinarySumsPass, ResidualSumsPass

SIGNATURE = "g (float[2, 4] x, float[2, 4] s) => (float[2, 4] y)"
W = {"w": np.ones(4, np.float32)}


def test_sums_before_norms_and_gelus_become_sum() -> None:
    body = "{ a = %s(x, s) n = LayerNormalization(a, w) b = %s(n, w) g = Gelu(b) y = Add(g, a) }"
    model = graph(f"{SIGNATURE} {body % ('Add', 'Add')}", **W)
    assert apply(ResidualSumsPass(), model) == []
    assert_same(model, graph(f"{SIGNATURE} {body % ('Sum', 'Sum')}", **W))


def test_sums_of_two_values_become_add_again() -> None:
    body = "{ a = %s(x, s) n = LayerNormalization(a, w) b = Sum(n, w, s) y = Gelu(b) }"
    model = graph(f"{SIGNATURE} {body % 'Sum'}", **W)
    assert apply(BinarySumsPass(), model) == []
    assert_same(model, graph(f"{SIGNATURE} {body % 'Add'}", **W))


def test_other_sums_stay() -> None:
    text = f"{SIGNATURE} {{ a = Add(x, s) r = Relu(a) n = LayerNormalization(x, a) y = Add(r, n) }}"
    model = graph(text)
    assert apply(ResidualSumsPass(), model) == []
    assert_same(model, graph(text))
