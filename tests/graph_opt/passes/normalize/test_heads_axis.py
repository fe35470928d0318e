from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import apply, assert_same, graph
from onnx.reference import ReferenceEvaluator

from carryall.graph_opt.passes.normalize.heads_axis import HeadsAxisPass

SIGNATURE = """g (float[N, 2, 4, 8] q, float[N, 2, 6, 8] k, float[N, 2, 6, 8] v, float[N, 1, 4, 6] mask)
    => (float[N, 2, 4, 8] y)"""
SHAPES = """<float[n, 4, 8] a, float[n, 6, 8] b, float[n, 8, 6] t, float[n, 4, 6] c, float[N, 2, 4, 6] scores,
    float[N, 2, 4, 6] masked, float[n, 4, 6] d, float[n, 4, 6] p, float[n, 6, 8] e, float[n, 4, 8] o>"""
# torch.bmm of q and k, and of the weights and v, as transformers' XGLM is traced
TRACED = """a = Reshape (q, queries) b = Reshape (k, keys) t = Transpose <perm = [0, 2, 1]> (b)
    c = MatMul (a, t) scores = Reshape (c, split) masked = Add (scores, mask) d = Reshape (masked, joined)
    p = Softmax <axis = -1> (d) e = Reshape (v, keys) o = MatMul (p, e) y = Reshape (o, result)"""
GIVEN = {
    "queries": np.array([-1, 4, 8]),
    "keys": np.array([-1, 6, 8]),
    "split": np.array([-1, 2, 4, 6]),
    "joined": np.array([-1, 4, 6]),
    "result": np.array([-1, 2, 4, 8]),
}


def traced(body: str = TRACED, shapes: str = SHAPES) -> ir.Model:
    return graph(f"{SIGNATURE} {shapes} {{ {body} }}", **GIVEN)


def result(model: ir.Model) -> Any:
    rng = np.random.default_rng(0)
    sizes = {"q": (3, 2, 4, 8), "k": (3, 2, 6, 8), "v": (3, 2, 6, 8), "mask": (3, 1, 4, 6)}
    feed = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feed)


def test_products_of_merged_heads_are_computed_on_four_axes() -> None:
    model = traced()
    expected = result(model)
    assert apply(HeadsAxisPass(), model) == []
    after = """t = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul (q, t) masked = Add (scores, mask)
        p = Softmax <axis = -1> (masked) y = MatMul (p, v)"""
    assert_same(model, traced(after, ""))
    np.testing.assert_array_equal(result(model)[0], expected[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("float[n, 4, 8] a", "float[n, m, 8] a"),  # the Reshape may merge or split other axes
        ("perm = [0, 2, 1]", "perm = [1, 2, 0]"),
        ("float[N, 2, 4, 6] scores", "float[N, M, 4, 6] scores"),  # other heads than those of q
    ],
    ids=["unknown rows", "batches move", "other heads"],
)
def test_products_of_other_axes_stay(before: str, after: str) -> None:
    changed = traced(TRACED.replace(before, after), SHAPES.replace(before, after))
    apply(HeadsAxisPass(), changed)
    first = next(node for node in changed.graph if node.op_type == "MatMul")
    assert first.inputs[0] is not None
    assert str(first.inputs[0].name) == "a"


def test_a_softmax_over_another_axis_stays() -> None:
    changed = traced(TRACED.replace("axis = -1", "axis = 1"))
    apply(HeadsAxisPass(), changed)
    assert [node.op_type for node in changed.graph][-2:] == ["MatMul", "Reshape"]
