"""What an operator counts among its inputs stays when the unused is removed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import random_graphs
from hypothesis import given
from hypothesis import strategies as st
from onnx_ir.passes import common

from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import model_passes


def loop(opset: int) -> ir.Model:
    """Return a Loop that takes rows of x, with a trip count and an empty condition at the end."""
    body = ir.Graph(
        [ir.val("i", ir.DataType.INT64, []), ir.val("c", ir.DataType.BOOL, [])], [], nodes=[], name="body"
    )
    x, n = ir.val("x", ir.DataType.FLOAT, [3, 4]), ir.val("n", ir.DataType.INT64, [])
    row = ir.node("Gather", [x, body.inputs[0]])
    keep = ir.node("Identity", [body.inputs[1]])
    body.extend([row, keep])
    for node, name, dtype, shape in (
        (keep, "kept", ir.DataType.BOOL, []),
        (row, "row", ir.DataType.FLOAT, [4]),
    ):
        output = node.outputs[0]
        output.name, output.type, output.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        body.outputs.append(output)
    node = ir.node("Loop", [n, None], {"body": body})
    output = node.outputs[0]
    output.name, output.type, output.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([3, 4])
    unused = ir.node("Neg", [x])
    graph = ir.Graph([x, n], [output], nodes=[unused, node], opset_imports={"": opset}, name="g")
    return ir.Model(graph, ir_version=8)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_a_loop_without_a_condition_keeps_its_empty_input(opset: int) -> None:
    model = loop(opset)
    RemoveUnusedNodesPass()(model)
    (node,) = model.graph
    assert [value is None for value in node.inputs] == [False, True]
    optimized, _ = run(model, model_passes(), debug=True)
    content = ir.to_proto(optimized).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(session.run(None, {"x": x, "n": np.array(3)})[0], x)


def test_other_domains_keep_theirs_and_standard_operators_lose_what_says_nothing() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [3])
    foreign = ir.node("Odd", [x, None, None], domain="nobody.knows")
    clipped = ir.node("Clip", [foreign.outputs[0], None, None])
    graph = ir.Graph(
        [x], clipped.outputs, nodes=[foreign, clipped], opset_imports={"": 17, "nobody.knows": 1}, name="g"
    )
    RemoveUnusedNodesPass()(ir.Model(graph, ir_version=8))
    assert [len(node.inputs) for node in graph] == [3, 1]


@pytest.mark.long
@given(st.data())
def test_what_is_removed_of_random_graphs_is_what_onnx_ir_removes(data: st.DataObject) -> None:
    model = data.draw(random_graphs.models())
    theirs = ir.from_proto(ir.to_proto(model))
    ours = RemoveUnusedNodesPass()(model)
    assert ours.modified == common.RemoveUnusedNodesPass()(theirs).modified
    assert [(node.name, node.op_type, len(node.outputs)) for node in ours.model.graph.all_nodes()] == [
        (node.name, node.op_type, len(node.outputs)) for node in theirs.graph.all_nodes()
    ]
    assert set(ours.model.graph.initializers) == set(theirs.graph.initializers)
