"""Duplicate nodes are merged, in and across subgraphs and functions."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.cleanup.merge_duplicates import MergeDuplicatesPass

OPSETS = 'opset_import: ["" : 23, "their.own" : 1]'


def model_of(text: str) -> ir.Model:
    return ir.from_onnx_text(f"<ir_version: 11, {OPSETS}> {text}")


def test_equal_nodes_are_merged() -> None:
    model = graph("g (float[N] x) => (float[N] y) { a = Exp(x) b = Exp(x) y = Add(a, b) }")
    assert MergeDuplicatesPass()(model).modified
    assert_same(model, graph("g (float[N] x) => (float[N] y) { a = Exp(x) y = Add(a, a) }"))


def test_an_output_keeps_its_name_type_and_shape() -> None:
    model = graph("g (float[N] x) => (float[N] y, float[N] z) { a = Exp(x) z = Neg(a) y = Exp(x) }")
    (a, *_) = model.graph
    assert a.outputs[0].type is None
    MergeDuplicatesPass()(model)
    (y, z) = model.graph.outputs
    assert (y.name, y.producer(), z.name) == ("y", a, "z")
    assert (y.type, y.shape) == (ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N"]))


def test_two_equal_outputs_keep_their_names() -> None:
    model = graph("g (float[N] x) => (float[N] y, float[N] z) { y = Exp(x) z = Exp(x) }")
    MergeDuplicatesPass()(model)
    assert [node.op_type for node in model.graph] == ["Exp", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


@pytest.mark.parametrize(
    "body",
    [
        "a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b)",
        "a = Bernoulli(x) b = Bernoulli(x) y = Add(a, b)",
        "a = their.own.Draw(x) b = their.own.Draw(x) y = Add(a, b)",
        "a = LeakyRelu<alpha = 0.5>(x) b = LeakyRelu<alpha = 0.25>(x) y = Add(a, b)",
        "a = Elu<alpha = 0.0>(x) b = Elu<alpha = -0.0>(x) y = Add(a, b)",
    ],
)
def test_nodes_that_may_differ_stay(body: str) -> None:
    model = model_of(f"g (float[N] x) => (float[N] y) {{ {body} }}")
    assert not MergeDuplicatesPass()(model).modified
    assert len(model.graph) == 3


def test_equal_initializers_are_merged() -> None:
    text = "g (float[2] x) => (float[2] y) { a = Mul(x, v) b = Mul(x, w) c = Mul(x, n) y = Sum(a, b, c) }"
    same, other = np.array([0.0, 2], np.float32), np.array([-0.0, 2], np.float32)
    model = graph(text, v=same, w=same.copy(), n=other)
    MergeDuplicatesPass()(model)
    assert sorted(model.graph.initializers) == ["n", "v"]
    assert [node.op_type for node in model.graph] == ["Mul", "Mul", "Sum"]


def test_initializers_that_a_caller_may_override_or_get_stay() -> None:
    model = model_of("""g (float[1] x, float[1] v) => (float[1] y, float[1] w)
        <float[1] v = {1}, float[1] u = {1}, float[1] w = {1}> {
        a = Add(x, v) b = Add(a, u) y = Add(b, w) }""")
    assert not MergeDuplicatesPass()(model).modified
    assert sorted(model.graph.initializers) == ["u", "v", "w"]


BRANCHES = """g (float[2] x, bool c) => (float[2] y, float[2] z) <float[2] w = {1, 2}> {
    o = Exp(x)
    y = If (c) <
        then_branch = yes () => (float[2] t) <float[2] v = {1, 2}> {
            a = Exp(x) b = Exp(a) d = Exp(o) e = Mul(b, v) f = Mul(d, w) t = Add(e, f) },
        else_branch = no () => (float[2] u) { u = Exp(x) }>
    late = Sin(x) p = If (c) <
        then_branch = yes2 () => (float[2] t2) { t2 = Sin(x) },
        else_branch = no2 () => (float[2] u2) { q = Neg(x) r = Neg(x) u2 = Add(q, r) }>
    n = Neg(x) z = Sum(late, p, n) }"""


def test_branches_use_outer_values_but_not_the_reverse() -> None:
    model, before = model_of(BRANCHES), model_of(BRANCHES)
    assert MergeDuplicatesPass()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    first, second = (node for node in model.graph if node.op_type == "If")
    branches = [
        [inner.op_type for inner in node.attributes[f"{name}_branch"].as_graph()]
        for node in (first, second)
        for name in ("then", "else")
    ]
    assert branches == [["Exp", "Mul", "Add"], ["Identity"], ["Identity"], ["Neg", "Add"]]
    assert [node.op_type for node in model.graph] == ["Exp", "If", "Sin", "If", "Neg", "Sum"]
    assert not first.attributes["then_branch"].as_graph().initializers
    for condition in (True, False):
        feed = {"x": np.array([0.5, -1], np.float32), "c": np.array(condition)}
        for found, expected in zip(evaluate(model, feed), evaluate(before, feed), strict=True):
            np.testing.assert_array_equal(found, expected)


LOOP = """g (float[2] x, int64 n) => (float[2] y) {
    t = Constant <value = bool {1}>() o = Exp(x)
    y = Loop (n, t, x) <body = b (int64 i, bool k, float[2] s) => (bool m, float[2] r) {
        m = Identity(k) a = Exp(x) d = Exp(s) e = Exp(s) f = Add(d, e) r = Add(f, a) }> }"""


def test_a_loop_uses_the_outer_value() -> None:
    model, before = model_of(LOOP), model_of(LOOP)
    MergeDuplicatesPass()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    body = model.graph[-1].attributes["body"].as_graph()
    assert [node.op_type for node in body] == ["Identity", "Exp", "Add", "Add"]
    feed = {"x": np.array([0.1, -0.2], np.float32), "n": np.array(2)}
    np.testing.assert_array_equal(evaluate(model, feed)[0], evaluate(before, feed)[0])


def test_functions_too_and_parameters_are_compared_by_name() -> None:
    text = """<ir_version: 11, opset_import: ["" : 23, "own" : 1]>
        g (float[N] x) => (float[N] y) { y = own.F <alpha = 0.5, beta = 0.25> (x) }
        <domain: "own", opset_import: ["" : 23]> F <alpha, beta> (a) => (b) {
            c = Exp(a) d = Exp(a)
            e = LeakyRelu<alpha: float = @alpha>(c) f = LeakyRelu<alpha: float = @alpha>(d)
            h = LeakyRelu<alpha: float = @beta>(c) i = Add(e, f) b = Add(i, h) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    MergeDuplicatesPass()(model)
    (function,) = model.functions.values()
    assert [node.op_type for node in function] == ["Exp", "LeakyRelu", "LeakyRelu", "Add", "Add"]


def test_a_missing_optional_output_is_added() -> None:
    body = """a, , s = LayerNormalization(x, w) b, m, t = LayerNormalization(x, w)
        u = Add(a, b) v = Add(m, t) z = Add(v, s) y = Add(u, z)"""
    model = graph(f"g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}", w=np.ones(3, np.float32))
    feed = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    before = evaluate(model, feed)[0]
    assert apply(MergeDuplicatesPass(), model) == []
    assert [node.op_type for node in model.graph].count("LayerNormalization") == 1
    np.testing.assert_array_equal(evaluate(model, feed)[0], before)
