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
