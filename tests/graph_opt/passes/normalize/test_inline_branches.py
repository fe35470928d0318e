from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.normalize.inline_branches import InlineBranchesPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes

SIGNATURE = "g (float[2] x, bool[1] c) => (float[n] y)"
WEIGHTS = {"yes": np.array(True), "no": np.array([False]), "w": np.array([2, 3], np.float32)}


def choice(condition: str, then: str = "a = Tanh(t)", other: str = "a = Mul(t, w)", result: str = "b") -> str:
    """A node that chooses between two graphs, whose result is ``a``."""
    return (
        f"{result} = If ({condition}) <then_branch = t () => (float[n] a) {{ {then} }}, "
        f"else_branch = e () => (float[n] a) {{ {other} }}>"
    )


@pytest.mark.parametrize(("condition", "nodes"), [("yes", "b = Tanh(t)"), ("no", "b = Mul(t, w)")])
def test_the_branch_of_a_constant_condition_takes_the_place_of_its_node(condition: str, nodes: str) -> None:
    before, model = (
        graph(f"{SIGNATURE} {{ t = Exp(x) {choice(condition)} y = Neg(b) }}", **WEIGHTS) for _ in "ab"
    )
    assert apply(InlineBranchesPass(), model) == []
    assert_same(model, graph(f"{SIGNATURE} {{ t = Exp(x) {nodes} y = Neg(b) }}", **WEIGHTS))
    feed = {"x": np.array([0.5, -1], np.float32), "c": np.array([True])}
    np.testing.assert_array_equal(evaluate(model, feed)[0], evaluate(before, feed)[0])


def test_a_computed_condition_stays() -> None:
    model = graph(f"{SIGNATURE} {{ t = Exp(x) {choice('c')} y = Neg(b) }}", **WEIGHTS)
    assert apply(InlineBranchesPass(), model) == []
    assert [node.op_type for node in model.graph] == ["Exp", "If", "Neg"]


def test_branches_within_branches_and_of_equal_names_are_inlined() -> None:
    inner = choice("no", "a = Sin(t)", "s = Cos(t) a = Add(s, w)", "r")
    outer = choice("yes", f"s = Abs(t) {inner} a = Mul(r, s)")
    model = graph(
        f"{SIGNATURE} {{ t = Exp(x) {outer} {choice('yes', result='d')} y = Add(b, d) }}", **WEIGHTS
    )
    assert apply(InlineBranchesPass(), model) == []
    expected = "s = Abs(t) q = Cos(t) r = Add(q, w) b = Mul(r, s) d = Tanh(t)"
    assert_same(model, graph(f"{SIGNATURE} {{ t = Exp(x) {expected} y = Add(b, d) }}", **WEIGHTS))
    content = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.array([0.5, -1], np.float32), "c": np.array([True])})[0].shape == (2,)


def test_a_branch_that_only_passes_a_value_on_keeps_the_outputs_name() -> None:
    model = graph(f"{SIGNATURE} {{ t = Exp(x) {choice('yes', 'a = Identity(t)', result='y')} }}", **WEIGHTS)
    apply(InlineBranchesPass(), model)
    assert [value.name for value in model.graph.outputs] == ["y"]
    np.testing.assert_allclose(
        evaluate(model, {"x": np.array([0, 1], np.float32)})[0], np.exp([0, 1]), rtol=1e-6
    )


def test_onnxruntime_takes_a_value_that_only_a_branch_reads() -> None:
    """Its own fold of such a branch removes the value: "Node input 't' is not a graph input"."""
    interface = "g (float[4, 2] x) => (float[a, b] y, int64[2] s)"
    model = graph(f"{interface} {{ t = Exp(x) {choice('no')} s = Shape(t) y = Neg(b) }}", **WEIGHTS)
    run(model, model_passes())
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result, shape = session.run(None, {"x": np.ones((4, 2), np.float32)})
    np.testing.assert_allclose(result, -np.exp(1) * np.tile(np.array([2, 3]), (4, 1)), rtol=1e-6)
    assert shape.tolist() == [4, 2]
