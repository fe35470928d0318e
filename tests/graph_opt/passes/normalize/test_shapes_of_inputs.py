from __future__ import annotations

import numpy as np
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.normalize.shapes_of_inputs import ShapesOfInputsPass

GRAPH = "g (int64[b, s] ids) => (int64 n, float[b, s, 6] y) {"
TABLE = np.arange(24, dtype=np.float32).reshape(4, 6)
ONE = np.array(1)


def test_sizes_of_computed_values_are_those_of_inputs() -> None:
    model = graph(
        GRAPH + "x = Gather (table, ids) sizes = Shape (x) n = Gather (sizes, one) y = Expand (x, sizes) }",
        table=TABLE,
        one=ONE,
    )
    ids = {"ids": np.array([[1, 2, 3], [0, 1, 2]])}
    expected = evaluate(model, ids)
    assert apply(ShapesOfInputsPass(), model) == []
    same = graph(
        GRAPH + "x = Gather (table, ids) first = Shape <start = 0, end = 2> (ids)"
        "sizes = Concat <axis = 0> (first, rest) n = Gather (first, one) y = Expand (x, sizes) }",
        table=TABLE,
        one=ONE,
        rest=np.array([6]),
    )
    assert_same(model, same)
    for found, right in zip(evaluate(model, ids), expected, strict=True):
        np.testing.assert_array_equal(found, right)


def test_sizes_that_no_input_has_stay() -> None:
    text = """g (int64[b, s] ids) => (int64 n) {
        mask = Greater (ids, one) found = NonZero (mask) sizes = Shape (found) n = Gather (sizes, one)
    }"""
    model = graph(text, one=ONE)
    apply(ShapesOfInputsPass(), model)
    assert_same(model, graph(text, one=ONE))
