"""Transposes move down past elementwise operators until they cancel with their inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graph_asserts import apply, assert_same, evaluate, graph

from carryall.graph_opt.passes.normalize.simplify_shapes import SimplifyShapesPass
from carryall.graph_opt.passes.normalize.sink_transposes import SinkTransposesPass
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass

SIGNATURE = "g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y)"
LAST = "Transpose <perm = [0, 2, 3, 1]>"
BACK = "Transpose <perm = [0, 3, 1, 2]>"
GIVEN: dict[str, Any] = {
    "c": np.arange(3, dtype=np.float32),
    "r": np.arange(15, dtype=np.float32).reshape(5, 3),
    "one": np.float32(1),
    "pads": np.array([0, 1, 2, 0, 0, 0, 0, 1]),
    "axes": np.array([1, 2]),
    "last": np.array([-1]),
}
SHAPES = "<float[2, 4, 5, 3] t, float[2, 4, 5, 3] a, float[2, 4, 5, 3] b, float[2, 4, 5, 3] d>"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (f"t = {LAST} (x) a = Relu(t) b = Add(a, c) d = Mul(one, b) y = {BACK} (d)", ["Relu", "Add", "Mul"]),
        (f"t = {LAST} (x) a = Sub(r, t) b = Clip(a, one) y = {BACK} (b)", ["Sub", "Clip"]),
        (f"t = {LAST} (x) a = Abs(x) b = {LAST} (a) d = Mul(t, b) y = {BACK} (d)", ["Abs", "Mul"]),
    ],
    ids=["channels", "rows and columns", "two of one kind"],
)
def test_inverse_transposes_cancel(body: str, left: list[str]) -> None:
    before, after = (graph(f"{SIGNATURE} {SHAPES} {{ {body} }}", **GIVEN) for _ in range(2))
    SinkTransposesPass()(after)
    SimplifyShapesPass(decoder=False)(after)
    RemoveUnusedNodesPass()(after)
    assert [node.op_type for node in after.graph] == left
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(after, {"x": x})[0], evaluate(before, {"x": x})[0])


@pytest.mark.parametrize(
    ("body", "shape", "left"),
    [
        (f"t = {LAST} (x) y = Pad(t, pads)", [2, 5, 7, 4], ["Pad", "Transpose"]),
        (f"t = {LAST} (x) y = ReduceMean(t, axes)", [2, 1, 1, 3], ["ReduceMean", "Transpose"]),
        (f"t = {LAST} (x) y = ReduceMax <keepdims = 0> (t, axes)", [2, 3], ["ReduceMax"]),
        (f"t = {LAST} (x) y = ReduceSum <keepdims = 0> (t, last)", [2, 4, 5], ["ReduceSum"]),
        ("t = Transpose <perm = [3, 2, 1, 0]> (x) y = ReduceMin <keepdims = 0> (t, last)", [5, 4, 3],
         ["ReduceMin", "Transpose"]),
    ],
)  # fmt: skip
def test_axes_and_pads_move_along(body: str, shape: list[int], left: list[str]) -> None:
    text = f"g (float[2, 3, 4, 5] x) => (float{shape} y) {{ {body} }}"
    before, after = (graph(text, **GIVEN) for _ in range(2))
    assert apply(SinkTransposesPass(), after) == []
    assert [node.op_type for node in after.graph] == left
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(evaluate(after, {"x": x})[0], evaluate(before, {"x": x})[0])


@pytest.mark.parametrize(
    "body",
    [
        f"t = {LAST} (x) a = Relu(t) b = Neg(t) d = Add(a, b) y = {BACK} (d)",
        f"t = {LAST} (x) a = Softmax(t) y = {BACK} (a)",
        f"t = {LAST} (x) u = Transpose <perm = [0, 3, 2, 1]> (v) a = Add(t, u) y = {BACK} (a)",
    ],
    ids=["read twice", "an axis counts", "another permutation"],
)
def test_others_stay(body: str) -> None:
    text = f"g (float[2, 3, 4, 5] x, float[2, 3, 5, 4] v) => (float[2, 3, 4, 5] y) {SHAPES} {{ {body} }}"
    model, before = (graph(text, **GIVEN) for _ in range(2))
    apply(SinkTransposesPass(), model)
    assert_same(model, before)


def test_no_more_is_moved_than_before() -> None:
    """A Transpose does not move past an operator whose other operand makes the result larger."""
    text = """g (float[1, 3] x, float[4, 3] w) => (float[4, 3] y) <float[3, 1] t, float[3, 4] a> {
        t = Transpose <perm = [1, 0]> (x) a = Add(t, k) y = Transpose <perm = [1, 0]> (a) }"""
    model, before = (graph(text, k=np.ones((3, 4), np.float32)) for _ in range(2))
    apply(SinkTransposesPass(), model)
    assert_same(model, before)
