from __future__ import annotations

import numpy as np
import pytest
from graph_asserts import apply, assert_same, graph

from carryall.graph_opt.passes.normalize.whole_softmax import WholeSoftmaxPass

TEXT = """g (float[n, 2, 3] x) => (float[n, 2, 3] y) {{
    f = Flatten <axis = {axis}> (x) s = {kind} <axis = {along}> (f) y = Reshape(s, to) }}"""
GIVEN = {"to": np.array([-1, 2, 3])}


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [2, -1])
def test_a_softmax_over_the_last_axis_needs_no_reshape(kind: str, axis: int) -> None:
    model = graph(TEXT.format(axis=axis, kind=kind, along=-1), **GIVEN)
    assert apply(WholeSoftmaxPass(), model) == []
    assert_same(model, graph(f"g (float[n, 2, 3] x) => (float[n, 2, 3] y) {{ y = {kind} <axis = -1> (x) }}"))


@pytest.mark.parametrize(("axis", "along"), [(1, -1), (2, 0)], ids=["two axes", "the other axis"])
def test_others_stay(axis: int, along: int) -> None:
    model, before = (graph(TEXT.format(axis=axis, kind="Softmax", along=along), **GIVEN) for _ in range(2))
    assert apply(WholeSoftmaxPass(), model) == []
    assert_same(model, before)


@pytest.mark.parametrize(
    ("of", "left"), [("x", ["Softmax"]), ("z", ["Shape", "Flatten", "Softmax", "Reshape"])]
)
def test_a_shape_without_names_is_inferred_from_its_source(of: str, left: list[str]) -> None:
    text = f"""g (float[a, b, c] x, float[d, e, f] z) => (float[g, h, i] y) {{ to = Shape({of})
        f = Flatten <axis = 2> (x) s = Softmax(f) y = Reshape(s, to) }}"""
    model = graph(text)
    assert apply(WholeSoftmaxPass(), model) == []
    assert [node.op_type for node in model.graph] == left
