"""Shapes are inferred as onnx_ir's own pass infers them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import random_graphs
from graph_asserts import graph
from hypothesis import given
from hypothesis import strategies as st
from onnx_ir import traversal
from onnx_ir.passes import common
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.passes.shape_inference import ShapeInferencePass


def untyped(model: ir.Model) -> ir.Model:
    """Return a copy whose computed values have neither types nor shapes."""
    copy = ir.from_proto(ir.to_proto(model))
    for node in traversal.RecursiveGraphIterator(copy.graph):
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    return copy


def known(model: ir.Model) -> list[tuple[str | None, str, str]]:
    nodes = traversal.RecursiveGraphIterator(model.graph)
    values = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
    return [(value.name, str(value.type), str(value.shape)) for value in values]


def assert_as_onnx_ir(model: ir.Model) -> int:
    """Compare both passes; return how many values have a shape."""
    ours, theirs = untyped(model), untyped(model)
    changed = ShapeInferencePass()(ours).modified
    assert changed == common.ShapeInferencePass()(theirs).modified
    assert known(ours) == known(theirs)
    return sum(shape != "None" for _, _, shape in known(ours))


@given(st.data())
def test_shapes_of_random_graphs_are_those_of_onnx_ir(data: st.DataObject) -> None:
    assert_as_onnx_ir(data.draw(random_graphs.models()))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_shapes_of_decoders_are_those_of_onnx_ir(tmp_path: Path, family: str) -> None:
    model = export_model(write_tiny(family, tmp_path / "checkpoint"))
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    ShapeInferencePass()(model)
    assert weights == {name: value.const_value for name, value in model.graph.initializers.items()}
    assert [value.name for value in model.graph.inputs if value.name in weights] == []
    small = ir.from_proto(ir.to_proto(model))
    assert assert_as_onnx_ir(small) > len(small.graph)


def test_a_graph_whose_inference_fails_stays(caplog: pytest.LogCaptureFixture) -> None:
    text = "g (float[2, 3] x, float[4, 5] y) => (float[N, M] z) { a = Relu(x) z = MatMul(a, y) }"
    model = graph(text)
    assert not ShapeInferencePass()(model).modified
    assert "shapes cannot be inferred" in caplog.text
    assert model.graph[0].outputs[0].shape is None
