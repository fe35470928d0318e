from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.cleanup.remove_identities import RemoveIdentitiesPass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{ a = Identity(x) y = Abs(a) }", "{ y = Abs(x) }"),
        ("{ a = Abs(x) y = Identity(a) }", "{ y = Abs(x) }"),
        ("{ a = Abs(x) b = Identity(a) c = Identity(b) y = Add(b, c) }", "{ a = Abs(x) y = Add(a, a) }"),
        ("{ y = Identity(x) }", "{ y = Identity(x) }"),
    ],
)
def test_identities_are_removed_except_between_input_and_output(before: str, after: str) -> None:
    signature = "g (float[N] x) => (float[N] y)"
    model = graph(f"{signature} {before}")
    assert apply(RemoveIdentitiesPass(), model) == []
    assert_same(model, graph(f"{signature} {after}"))
    assert [value.name for value in model.graph.outputs] == ["y"]


def test_a_value_that_is_returned_twice_keeps_one() -> None:
    text = "g (float[N] x) => (float[N] y, float[N] z) { y = Abs(x) z = Identity(y) }"
    model = graph(text)
    apply(RemoveIdentitiesPass(), model)
    assert_same(model, graph(text))


BRANCHES = """g (float[N] x, bool c) => (float[N] y) { o = Abs(x) i = Identity(o)
    y = If(c) <then_branch = t () => (float[N] a) { a = Identity(i) },
        else_branch = e () => (float[N] b) { u = Identity(o) v = Neg(u) b = Identity(v) }> }"""


def test_a_branch_never_returns_a_value_from_outside() -> None:
    model = graph(BRANCHES)
    apply(RemoveIdentitiesPass(), model)
    onnx.checker.check_model(ir.to_proto(model))
    branches = {name: attribute.as_graph() for name, attribute in model.graph[1].attributes.items()}
    assert [node.op_type for node in branches["then_branch"]] == ["Identity"]
    assert [node.op_type for node in branches["else_branch"]] == ["Neg"]


def test_identities_in_functions_are_removed() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        g (float[N] x) => (float[N] y) { y = own.F(x) }
        <domain: "own", opset_import: ["" : 20]> F (a) => (b) { c = Identity(a) b = Abs(c) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert RemoveIdentitiesPass()(model).modified
    (function,) = model.functions.values()
    assert [node.op_type for node in function] == ["Abs"]


@pytest.mark.parametrize("body", ["y = Dropout(x)", "y = Dropout(x, half)", "y, m = Dropout(x, half, off)"])
def test_a_dropout_without_training_is_removed(body: str) -> None:
    text = "g (float[2, 3] a) => (float[2, 3] z) { x = Neg(a) %s z = Abs(y) }"
    model = graph(text % body, half=np.float32(0.5), off=np.array(False))
    assert apply(RemoveIdentitiesPass(), model) == []
    assert [node.op_type for node in model.graph] == ["Neg", "Abs"]


@pytest.mark.parametrize(
    "body",
    ["y = Dropout(x, half, on)", "y = Dropout(x, half, t)", "d, m = Dropout(x) y = Where(m, d, x)"],
    ids=["training", "perhaps training", "a mask that is read"],
)
def test_any_other_dropout_stays(body: str) -> None:
    text = f"g (float[2, 3] a, bool t) => (float[2, 3] z) {{ x = Neg(a) {body} z = Abs(y) }}"
    model = graph(text, half=np.float32(0.5), on=np.array(True))
    apply(RemoveIdentitiesPass(), model)
    assert "Dropout" in [node.op_type for node in model.graph]
