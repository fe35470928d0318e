"""Graphs with another rounding: GELU looked up in 16 bits, and weights one unit in the last place away."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper


def with_half_gelu(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with GELU as ggml computes it: between -10 and 10 from a table of float16."""
    changed = ir.from_proto(model)
    for node in [node for node in changed.graph if node.op_type == "Gelu"]:
        _round(changed.graph, node)
    return ir.to_proto(changed)


def _round(graph: ir.Graph, gelu: ir.Node) -> None:
    nodes: list[ir.Node] = []

    def value(name: str, *inputs: ir.Value, **attributes: ir.Attr | int | ir.TensorProtocol) -> ir.Value:
        nodes.append(ir.node(name, inputs, attributes))
        return nodes[-1].outputs[0]

    def rounded(exact: ir.Value) -> ir.Value:
        half = value("Cast", exact, to=int(ir.DataType.FLOAT16))
        return value("Cast", half, to=int(ir.DataType.FLOAT))

    (source,), (target,) = gelu.inputs, gelu.outputs
    assert source is not None
    looked_up = rounded(value("Gelu", rounded(source), **gelu.attributes))
    is_far = value("GreaterOrEqual", value("Abs", source), value("Constant", value=ir.tensor(np.float32(10))))
    result = value("Where", is_far, value("Gelu", source, **gelu.attributes), looked_up)
    ir.convenience.replace_nodes_and_values(graph, gelu, [gelu], nodes, [target], [result])


def ulps_away(model: onnx.ModelProto, ulps: int, seed: int) -> onnx.ModelProto:
    """Return the model with each number of its float32 arrays so many units in the last place up or down."""
    changed, rng = onnx.ModelProto.FromString(model.SerializeToString()), np.random.default_rng(seed)
    for tensor in changed.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.dims:
            exact = numpy_helper.to_array(tensor)
            signs = rng.choice(np.array([-ulps, ulps], np.float32), exact.shape)
            tensor.CopyFrom(numpy_helper.from_array(exact + signs * np.spacing(exact), tensor.name))
    return changed
