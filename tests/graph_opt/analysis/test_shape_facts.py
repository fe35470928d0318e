"""Shapes of values, computed for several sets of sizes."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from graph_asserts import graph

from carryall.graph_opt.analysis.shape_facts import ShapeFacts

SPLITS = """g (float[N, 6] x, float[N, 4] z) => (float[N, A] a, float[N, B] b, float[N, C] c) {
    a, b = Split <axis = 1, num_outputs = 2> (x) c, d = Split <axis = 1, num_outputs = 2> (z)
    e, f = Split <axis = 1, num_outputs = 2> (x) y = Relu (f) }"""


def test_nodes_that_are_alike_are_inferred_once_and_others_are_not_taken_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen, infer = graph(SPLITS), list[bytes](), onnx.shape_inference.infer_node_outputs

    def counted(
        schema: Any, proto: Any, types: dict[str, onnx.TypeProto], *rest: Any, **more: Any
    ) -> dict[str, onnx.TypeProto]:
        seen.append(types["x0"].SerializeToString())
        return infer(schema, proto, types, *rest, **more)

    monkeypatch.setattr(onnx.shape_inference, "infer_node_outputs", counted)
    facts = ShapeFacts(model.graph)
    outputs = {str(value.name): value for node in model.graph for value in node.outputs}
    columns = {name: {shape[1] for shape in facts.shapes(value) or ()} for name, value in outputs.items()}
    assert columns == {"a": {3}, "b": {3}, "c": {2}, "d": {2}, "e": {3}, "f": {3}, "y": {3}}
    assert len(seen) == len(set(seen))
    assert len(seen) >= 2


def test_what_is_true_of_large_sizes_only_is_no_fact() -> None:
    """The graph runs with a N of 2 and more, so that not all axes can be 1; C still can."""
    model = graph(
        """g (float[N, C] x, float[2, 0] row) => (float[A, B] z) {
            s = Shape (x) two = Constant <value_ints = [2]> () least = Min (s, two)
            zeros = ConstantOfShape (least) z = Concat <axis = 1> (zeros, row) }"""
    )
    facts = ShapeFacts(model.graph, decoder=False)
    least = next(value for node in model.graph for value in node.outputs if value.name == "least")
    assert facts.content(least) is None
    assert {tuple(content.tolist()) for content in facts.contents(least) or ()} == {(2, 1), (2, 2)}
