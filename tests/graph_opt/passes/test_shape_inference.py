"""Shapes are inferred as onnx_ir's own pass infers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import random_graphs
from graph_asserts import graph
from hypothesis import given
from hypothesis import strategies as st
from onnx_ir import traversal
from onnx_ir.passes import common
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.passes.shape_inference import ShapeInferencePass
from carryall.runtime.models.graphs import load_graph


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


@pytest.mark.long
@given(st.data())
def test_shapes_of_random_graphs_are_those_of_onnx_ir(data: st.DataObject) -> None:
    assert_as_onnx_ir(data.draw(random_graphs.models()))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_shapes_of_decoders_are_those_of_onnx_ir(tmp_path: Path, family: str) -> None:
    model = export_model(write_tiny(family, tmp_path / "checkpoint"))
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    ShapeInferencePass()(model)
    assert weights == {name: value.const_value for name, value in model.graph.initializers.items()}
    assert [value.name for value in model.graph.inputs if value.name in weights] == []
    small = ir.from_proto(ir.to_proto(model))
    assert assert_as_onnx_ir(small) > len(small.graph)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])  # with and without minima
def test_shapes_of_quantized_weights_are_those_of_onnx_ir(tmp_path: Path, kind: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    write_gguf("llama", tmp_path / "model.gguf", types=kind, **sizes)
    model, _ = load_graph(str(tmp_path / "model.gguf"))
    products = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len(products) == 2 * 7 + 2
    assert assert_as_onnx_ir(model) > len(model.graph)


def test_nodes_beside_weights_have_their_own_shapes() -> None:
    text = """g (float[2, N] x) => (float[2, N] y, float[M] z, float[K, L, J] u) {
        w = DequantizeLinear <axis = 1, block_size = 2> (q, s)
        moved = Add(w, b) y = Add(moved, x) z = Reshape(w, flat) r = Reshape(moved, turned)
        wide = Add(w, deep) u = MatMul(wide, r)
    }"""
    weights = {
        "q": np.ones((2, 4), np.int8),
        "s": np.ones((2, 2), np.float32),
        "b": np.ones((2, 1), np.float32),
        "deep": np.ones((3, 1, 1), np.float32),
        "flat": np.array([-1]),
        "turned": np.array([4, 2]),
    }
    model = graph(text, **weights)
    assert_as_onnx_ir(model)
    ShapeInferencePass()(model)
    shapes = [node.outputs[0].shape for node in model.graph]
    assert shapes == [[2, 4], [2, 4], [2, 4], [8], [4, 2], [3, 2, 4], [3, 2, 2]]


def test_a_graph_whose_inference_fails_stays(caplog: pytest.LogCaptureFixture) -> None:
    text = "g (float[2, 3] x, float[4, 5] y) => (float[N, M] z) { a = Relu(x) z = MatMul(a, y) }"
    model = graph(text)
    assert not ShapeInferencePass()(model).modified
    assert "shapes cannot be inferred" in caplog.text
    assert model.graph[0].outputs[0].shape is None
