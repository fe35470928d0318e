"""Infer the types and shapes of values by onnx's own inference."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from ..graph.edit import subgraphs

_log = logging.getLogger(__name__)
_SMALL = 1000  # bytes; the inference looks into constants of up to this size


class ShapeInferencePass(ir.passes.InPlacePass):
    """Set the types and shapes of values. A graph on which the inference fails stays as it is.

    onnx_ir's pass of this name does the same, but makes a second graph of the result: half of its time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer strictly, with data propagation."""
        proto = _proto(model)
        try:
            inferred = onnx.shape_inference.infer_shapes(
                proto, check_type=True, strict_mode=True, data_prop=True
            )
        except (onnx.shape_inference.InferenceError, RuntimeError, TypeError, ValueError) as error:
            _log.warning("shapes cannot be inferred, so the graph is left as it is: %s", error)
            return ir.passes.PassResult(model, modified=False)
        return ir.passes.PassResult(model, modified=_take(model.graph, inferred.graph))


def _proto(model: ir.Model) -> onnx.ModelProto:
    """Return a model without weights, which are inputs of the main graph."""
    proto = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.functions.extend(ir.serde.serialize_function(function) for function in model.functions.values())
    graph, target = model.graph, proto.graph
    target.name = graph.name or "graph"
    inputs = dict.fromkeys([*graph.inputs, *graph.initializers.values()])
    for value in inputs:
        tensor = value.const_value
        if tensor is not None and value.is_initializer():
            value.shape = value.shape or ir.Shape(tensor.shape.numpy())
            value.dtype = value.dtype or tensor.dtype
            if tensor.nbytes <= _SMALL:
                ir.serde.serialize_tensor_into(target.initializer.add(), tensor)
                target.initializer[-1].name = str(value.name)
        ir.serde.serialize_value_into(target.input.add(), value)
    for node in graph:
        ir.serde.serialize_node_into(target.node.add(), node)
        for value in node.outputs:
            if not value.is_graph_output() and (value.type is not None or value.shape is not None):
                ir.serde.serialize_value_into(target.value_info.add(), value)
    for value in graph.outputs:
        ir.serde.serialize_value_into(target.output.add(), value)
    return proto


def _take(graph: ir.Graph, inferred: onnx.GraphProto) -> bool:
    """Set what was inferred of the nodes' outputs; return whether that changed any of them."""
    known = {info.name: info.type for info in (*inferred.value_info, *inferred.output)}
    modified = False
    for node, proto in zip(graph, inferred.node, strict=True):
        for value in node.outputs:
            found = known.get(str(value.name))
            if found is not None:
                modified |= _set(value, found)
        inner = [part for attribute in proto.attribute for part in _graphs(attribute)]
        for part, of_part in zip(subgraphs(node), inner, strict=True):
            modified |= _take(part, of_part)
    return modified


def _graphs(attribute: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    return [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs


def _set(value: ir.Value, found: onnx.TypeProto) -> bool:
    if found.WhichOneof("value") == "tensor_type" and found.tensor_type.HasField("shape"):
        dims = [_size(dim) for dim in found.tensor_type.shape.dim]
        return _set_tensor(value, ir.DataType(found.tensor_type.elem_type), dims)
    shape, kind = (
        ir.serde.deserialize_type_proto_for_shape(found),
        ir.serde.deserialize_type_proto_for_type(found),
    )
    changed = False
    if shape is not None and value.shape != shape:
        value.shape, changed = shape, True
    if kind is not None and value.dtype != kind.dtype:
        value.dtype, changed = kind.dtype, True
    return changed


def _set_tensor(value: ir.Value, dtype: ir.DataType, dims: Sequence[int | str | None]) -> bool:
    """Set what differs; most values of an exported graph have their shape already."""
    changed = value.dtype != dtype
    if changed:
        value.dtype = dtype
    if value.shape is None or value.shape != dims:
        value.shape, changed = ir.Shape(dims), True
    return changed


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    kind = dim.WhichOneof("value")
    return None if kind is None else getattr(dim, kind)
