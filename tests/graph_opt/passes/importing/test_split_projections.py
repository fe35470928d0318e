from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.importing.split_projections import GemmToMatMulPass, SplitProjectionsPass

W, B = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(6, dtype=np.float32)
GIVEN = {
    "w": W,
    "b": B,
    "sizes": np.array([4, 2]),
    "i0": np.array([0]),
    "i4": np.array([4]),
    "far": np.array([2**62]),
    "last": np.array([-1]),
    "rows": np.array([-1, 4]),
    "back": np.array([0, -1, 6]),
    "flat": np.array([-1, 3]),
}
TWO = "g (float[N, S, 4] x) => (float[N, S, 4] y, float[N, S, 2] z) <float[N, S, 6] p> { %s }"
APART = "y = MatMul(x, wy) z = MatMul(x, wz)"
PARTS = {"wy": W[:, :4], "wz": W[:, 4:], "by": B[:4], "bz": B[4:]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("p = MatMul(x, w) y, z = Split <axis = -1> (p, sizes)", APART),
        ("p = MatMul(x, w) y = Slice(p, i0, i4, last) z = Slice(p, i4, far, last)", APART),
        (
            "p0 = MatMul(x, w) p = Add(p0, b) y, z = Split <axis = -1> (p, sizes)",
            "y0 = MatMul(x, wy) y = Add(y0, by) z0 = MatMul(x, wz) z = Add(z0, bz)",
        ),
    ],
    ids=["split", "slices", "biased"],
)
def test_a_product_for_each_part(before: str, after: str) -> None:
    model = graph(TWO % before, **GIVEN)
    assert apply(SplitProjectionsPass(), model) == []
    assert_same(model, graph(TWO % after, **PARTS))


def test_equal_parts_need_no_sizes() -> None:
    text = "g (float[N, S, 4] x) => (float[N, S, 3] y, float[N, S, 3] z) <float[N, S, 6] p> { %s }"
    model = graph(text % "p = MatMul(x, w) y, z = Split <axis = -1, num_outputs = 2> (p)", **GIVEN)
    assert apply(SplitProjectionsPass(), model) == []
    assert_same(model, graph(text % APART, wy=W[:, :3], wz=W[:, 3:]))


def test_a_product_that_is_read_whole_too_stays() -> None:
    text = """g (float[N, S, 4] x) => (float[N, S, 4] y, float[N, S, 6] z) <float[N, S, 6] p> {
        p = MatMul(x, w) y = Slice(p, i0, i4, last) z = Neg(p) }"""
    assert apply(SplitProjectionsPass(), graph(text, **GIVEN)) == [
        "its result is read both whole and in parts"
    ]


FLAT = "g (float[N, S, 4] x) => (float[N, S, 6] y) <float[M, 4] f, float[M, 6] p> { %s }"


@pytest.mark.parametrize(
    ("gemm", "after"),
    [
        ("p = Gemm(f, w, b)", "u = Reshape(x, same) m = MatMul(u, w) y = Add(m, b)"),
        ("p = Gemm <transB = 1> (f, wt)", "u = Reshape(x, same) y = MatMul(u, w)"),
    ],
)
def test_a_gemm_on_rows_becomes_a_product(gemm: str, after: str) -> None:
    model = graph(FLAT % f"f = Reshape(x, rows) {gemm} y = Reshape(p, back)", wt=W.T, **GIVEN)
    assert apply(GemmToMatMulPass(), model) == []
    assert_same(model, graph(FLAT % after, w=W, b=B, same=np.array([0, 0, 4])))


@pytest.mark.parametrize(
    ("gemm", "after"),
    [
        ("f = Reshape(x, rows) p = Gemm(f, w, b)", "f = Reshape(x, rows) m = MatMul(f, w) p = Add(m, b)"),
        ("f = Squeeze(x) p = Gemm <transB = 1> (f, wt)", "f = Squeeze(x) p = MatMul(f, w)"),
    ],
)
def test_rows_that_stay_rows_are_multiplied_as_rows(gemm: str, after: str) -> None:
    bodies = (f"{body} q = Neg(p) y = Reshape(q, back)" for body in (gemm, after))
    model, expected = (graph(FLAT % body, wt=W.T, **GIVEN) for body in bodies)
    assert apply(GemmToMatMulPass(), model) == []
    assert_same(model, expected)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "f = Reshape(x, rows) p = Gemm <alpha = 2.0> (f, w) y = Reshape(p, back)",
            "it has transA, alpha or beta",
        ),
        (
            "f = Reshape(x, rows) v = Neg(w) p = Gemm(f, v) y = Reshape(p, back)",
            "it is not a product of an activation and a weight",
        ),
        (
            "f = Reshape(x, rows) t = Neg(wt) p = Gemm <transB = 1> (f, wt) y = Reshape(p, back)",
            "its weight has other consumers, as that of a tied head",
        ),
    ],
)
def test_a_gemm_that_means_something_else_stays(body: str, reason: str) -> None:
    assert apply(GemmToMatMulPass(), graph(FLAT % body, wt=W.T, **GIVEN)) == [reason]


def test_the_contracts_head_on_a_quantized_table_is_no_near_miss() -> None:
    body = """f = Reshape(x, rows) t = DequantizeLinear <axis = 1> (codes, scales)
        p = Gemm <transB = 1> (f, t) y = Reshape(p, back)"""
    given = GIVEN | {"codes": np.ones(W.T.shape, np.int8), "scales": np.ones(W.shape[0], np.float32)}
    assert apply(GemmToMatMulPass(), graph(FLAT % body, **given)) == []


SHARED = """g (float[N, S, 4] x) => (float[N, S, 4] y, float[N, S, 2] z, float[N, S, 6] o)
    <float[N, S, 6] p, float[N, S, 6] q> {
    p0 = MatMul(x, w) p = Add(p0, b) a, c = Split <axis = -1> (p, sizes)
    u = Neg(x) q0 = MatMul(u, w) q = Add(q0, b) %s y = Add(a, d) z = Add(c, e) o = Identity(%s) }"""


def test_a_weight_of_several_layers_is_cut_once() -> None:
    """A5 of the findings: layers that share one weight made as many copies of its parts."""
    model = graph(SHARED % ("d, e = Split <axis = -1> (q, sizes)", "x"), **GIVEN)
    assert apply(SplitProjectionsPass(), model) == []
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 4
    assert len({node.inputs[1] for node in products}) == 2


@pytest.mark.parametrize(
    "other",
    ["d = Slice(q, i0, i4, last) i1 = Constant <value_ints = [5]> () e = Slice(q, i1, far, last)", None],
    ids=["cut elsewhere", "read whole"],
)
def test_a_weight_that_others_read_otherwise_is_not_cut(other: str | None) -> None:
    body = (other, "x") if other else ("d = Identity(a) e = Identity(c)", "q")
    model = graph(SHARED % body, **GIVEN)
    assert apply(SplitProjectionsPass(), model) == ["other consumers of its weight split it differently"]
    assert sum(node.op_type == "MatMul" for node in model.graph) == 2
