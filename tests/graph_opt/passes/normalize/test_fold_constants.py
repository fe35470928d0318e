from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.normalize.fold_constants import FoldConstantsPass
from carryall.graph_opt.passes.normalize.fold_transposes import FoldTransposesPass

W = np.arange(1000, dtype=np.float32) / 1000


def test_one_plus_a_norms_weight_is_one_weight() -> None:
    text = "g (float[N, 1000] x) => (float[N, 1000] y) { %s }"
    model = graph(text % "s = Add(w, one) t = Sqrt(s) y = Mul(x, t)", w=W, one=np.float32(1))
    assert apply(FoldConstantsPass(), model) == []
    assert_same(model, graph(text % "y = Mul(x, s)", s=np.sqrt(W + 1)))


def test_nothing_above_the_budget_is_computed() -> None:
    text = "g (float[N, 1000] x) => (float[N, 1000] y) { s = Add(w, one) y = Mul(x, s) }"
    model = graph(text, w=W, one=np.float32(1))
    apply(FoldConstantsPass(budget=999), model)
    assert [node.op_type for node in model.graph] == ["Add", "Mul"]


def test_operators_without_a_known_meaning_and_overridable_constants_stay() -> None:
    body = "s = Add(w, w) t = Erf(c) u = Add(s, t) y = Mul(x, u)"
    text = f"g (float[N, 2] x, float[2] w = {{1, 2}}) => (float[N, 2] y) {{ {body} }}"
    model = graph(text, c=np.ones(2, np.float32))
    apply(FoldConstantsPass(), model)
    assert [node.op_type for node in model.graph] == ["Add", "Erf", "Add", "Mul"]


def test_a_transposed_weight_is_folded_lazily() -> None:
    text = "g (float[N, 4] x) => (float[N, 3] y) { %s }"
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = graph(text % "t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)", w=w)
    assert apply(FoldTransposesPass(), model) == []
    assert_same(model, graph(text % "y = MatMul(x, t)", t=w.T))


def test_a_matrix_that_is_read_both_ways_is_stored_once() -> None:
    text = """g (float[N, 4] x) => (float[N, 3] y, float[3, 4] z) {
        t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t) z = Neg(w) }"""
    model = graph(text, w=np.ones((3, 4), np.float32))
    reason = "its matrix has other consumers, as that of a tied head"
    assert apply(FoldTransposesPass(), model) == [reason]


@pytest.mark.parametrize(("growth", "left"), [(None, ["Abs", "Add"]), (64, ["Expand", "Abs", "Add"])])
def test_a_result_may_be_kept_from_growing(growth: int | None, left: list[str]) -> None:
    text = """g (float[100] x) => (float[100] y) {
        w = Expand(one, shape) u = Abs(x) y = Add(u, w) }"""
    model = graph(text, one=np.ones(1, np.float32), shape=np.array([100]))
    apply(FoldConstantsPass(growth=growth), model)
    assert [node.op_type for node in model.graph] == left
