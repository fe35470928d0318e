from __future__ import annotations

import onnx_ir as ir
from graph_asserts import assert_same, graph

from carryall.graph_opt.passes.merge_duplicates import MergeDuplicatesPass


def test_nodes_that_compute_the_same_are_one() -> None:
    model = graph("g (float[N] x) => (float[N] y) { a = Exp(x) b = Exp(x) y = Add(a, b) }")
    assert MergeDuplicatesPass()(model).modified
    assert_same(model, graph("g (float[N] x) => (float[N] y) { a = Exp(x) y = Add(a, a) }"))


def test_an_output_keeps_its_name_type_and_shape() -> None:
    model = graph("g (float[N] x) => (float[N] y, float[N] z) { a = Exp(x) z = Neg(a) y = Exp(x) }")
    (a, *_) = model.graph
    assert a.outputs[0].type is None
    MergeDuplicatesPass()(model)
    (y, z) = model.graph.outputs
    assert (y.name, y.producer(), z.name) == ("y", a, "z")
    assert (y.type, y.shape) == (ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N"]))
