from __future__ import annotations

import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.lower.quick_gelu import QuickGeluPass


def test_silu_becomes_quick_gelu_with_alpha_one() -> None:
    model = graph("g (float[B, 4] x) => (float[B, 4] y) { s = Sigmoid(x) y = Mul(x, s) }")
    pass_ = QuickGeluPass()
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    expected = "g (float[B, 4] x) => (float[B, 4] y) { y = com.microsoft.QuickGelu <alpha = 1.0> (x) }"
    assert_same(model, graph(expected))


def test_a_factor_inside_of_the_sigmoid_becomes_alpha() -> None:
    text = """g (float[B, 4] x) => (float[B, 4] y) <float a = {1.702}> {
        z = Mul(a, x) s = Sigmoid(z) y = Mul(x, s) }"""
    model = graph(text)
    pass_ = QuickGeluPass()
    assert apply(pass_, model) == []
    assert pass_.fired == 1
    (node,) = model.graph
    assert node.op_type == "QuickGelu"
    assert node.attributes["alpha"].as_float() == pytest.approx(1.702)


def test_a_gate_of_another_value_stays() -> None:
    """x * sigmoid(z) is a gate, not SiLU."""
    text = "g (float[B, 4] x, float[B, 4] z) => (float[B, 4] y) { s = Sigmoid(z) y = Mul(x, s) }"
    model = graph(text)
    pass_ = QuickGeluPass()
    apply(pass_, model)
    assert pass_.fired == 0
    assert_same(model, graph(text))


def test_a_sigmoid_that_is_read_elsewhere_stays() -> None:
    """The sigmoid must be computed anyway."""
    text = "g (float[B, 4] x) => (float[B, 4] y, float[B, 4] s) { s = Sigmoid(x) y = Mul(x, s) }"
    model = graph(text)
    apply(QuickGeluPass(), model)
    assert_same(model, graph(text))
