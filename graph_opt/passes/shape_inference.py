"""Infer the types and shapes of values by onnx's own inference."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from ..graph.edit import subgraphs, weight
from ..graph.lazy import shape_of

_log = logging.getLogger(__name__)
_SMALL = 1000  # bytes; the inference looks into constants of up to this size
_OF_WEIGHTS = ("DequantizeLinear", "Add", "Reshape")  # they compute weights from blocks
Size = tuple[ir.DataType, tuple[int, ...]]  # the type and shape of a value


class ShapeInferencePass(ir.passes.InPlacePass):
    """Set the types and shapes of values. A graph on which the inference fails stays as it is.

    onnx_ir's pass of this name does the same, but makes a second graph of the result: half of its time.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer strictly, with data propagation."""
        weights = _dequantized_weights(model.graph)
        proto = _proto(model, weights)
        try:
            inferred = onnx.shape_inference.infer_shapes(
                proto, check_type=True, strict_mode=True, data_prop=True
            )
        except (onnx.shape_inference.InferenceError, RuntimeError, TypeError, ValueError) as error:
            _log.warning("shapes cannot be inferred, so the graph is left as it is: %s", error)
            return ir.passes.PassResult(model, modified=False)
        known = {value.producer() for value in weights}
        modified = _take([node for node in model.graph if node not in known], inferred.graph)
        for value, (dtype, shape) in weights.items():
            modified |= _set_tensor(value, dtype, shape)
        return ir.passes.PassResult(model, modified=modified)


def _dequantized_weights(graph: ir.Graph) -> dict[ir.Value, Size]:
    """Return the sizes of weights that nodes compute from blocks: two thirds of a quantized decoder's nodes.

    The inference need not know what computes them.
    """
    sizes = dict[ir.Value, Size]()
    for node in graph:
        if node.op_type not in _OF_WEIGHTS or node.domain or node.outputs[0].is_graph_output():
            continue
        size = _dequantized(node, sizes)
        if size is not None and node.outputs[0].type is None and node.outputs[0].shape is None:
            sizes[node.outputs[0]] = size
    return sizes


def _dequantized(node: ir.Node, sizes: Mapping[ir.Value, Size]) -> Size | None:
    """Return the size of the weight that a node computes, None if it computes none.

    Args:
        node: a node of an operator of ``_OF_WEIGHTS``.
        sizes: those of the weights before it.
    """
    first, second = (node.inputs[0], weight(node.inputs[1])) if len(node.inputs) > 1 else (None, None)
    if first is None or second is None:
        return None
    if node.op_type == "DequantizeLinear":
        levels = weight(first)
        if levels is None or "output_dtype" in node.attributes:
            return None
        return second.dtype, shape_of(levels)
    if first not in sizes:
        return None
    (dtype, shape), other = sizes[first], shape_of(second)
    if node.op_type == "Add":
        fits = second.dtype == dtype and len(other) == len(shape)
        fits = fits and all(b in (a, 1) for a, b in zip(shape, other, strict=True))
        return (dtype, shape) if fits else None
    wanted = tuple(second.numpy().tolist()) if second.nbytes <= _SMALL else ()
    fits = min(wanted, default=0) > 0 and math.prod(wanted) == math.prod(shape)
    return (dtype, wanted) if fits else None


def _proto(model: ir.Model, weights: Mapping[ir.Value, Size]) -> onnx.ModelProto:
    """Return a model without weights, which are inputs of the main graph.

    Args:
        model: the model.
        weights: values that are inputs too, with their sizes; what computes them is left out.
    """
    proto = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.functions.extend(ir.serde.serialize_function(function) for function in model.functions.values())
    graph, target = model.graph, proto.graph
    target.name = graph.name or "graph"
    left_out = {value.producer() for value in weights}
    inputs = dict.fromkeys([*graph.inputs, *graph.initializers.values()])
    for value in inputs:
        tensor = value.const_value
        if tensor is not None and value.is_initializer():
            value.shape = value.shape or ir.Shape(tensor.shape.numpy())
            value.dtype = value.dtype or tensor.dtype
            if not value.is_graph_input() and all(use.node in left_out for use in value.uses()):
                continue
            if tensor.nbytes <= _SMALL:
                ir.serde.serialize_tensor_into(target.initializer.add(), tensor)
                target.initializer[-1].name = str(value.name)
        ir.serde.serialize_value_into(target.input.add(), value)
    for value, (dtype, shape) in weights.items():
        if not all(use.node in left_out for use in value.uses()):
            kind = target.input.add(name=value.name).type.tensor_type
            kind.elem_type = dtype.value
            for size in shape:
                kind.shape.dim.add(dim_value=size)
    for node in graph:
        if node in left_out:
            continue
        ir.serde.serialize_node_into(target.node.add(), node)
        for value in node.outputs:
            if not value.is_graph_output() and (value.type is not None or value.shape is not None):
                ir.serde.serialize_value_into(target.value_info.add(), value)
    for value in graph.outputs:
        ir.serde.serialize_value_into(target.output.add(), value)
    return proto


def _take(nodes: Iterable[ir.Node], inferred: onnx.GraphProto) -> bool:
    """Set what was inferred of the nodes' outputs; return whether that changed any of them."""
    known = {info.name: info.type for info in (*inferred.value_info, *inferred.output)}
    modified = False
    for node, proto in zip(nodes, inferred.node, strict=True):
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
