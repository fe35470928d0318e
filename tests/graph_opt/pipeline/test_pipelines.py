from __future__ import annotations

import numpy as np
from graph_asserts import assert_same, graph

from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes


def test_nodes_without_effect_are_removed() -> None:
    text = """g (float[N] x) => (float[N] y) {
        two = Constant <value = float {2.0}> () a = Mul(x, two) b = Mul(x, two)
        c = Identity(a) unused = Neg(x) y = Add(c, b) }"""
    model, report = run(graph(text), portable_passes(), debug=True)
    assert_same(
        model, graph("g (float[N] x) => (float[N] y) { a = Mul(x, two) y = Add(a, a) }", two=np.float32(2))
    )
    assert report.after == {"Add": 1, "Mul": 1}
