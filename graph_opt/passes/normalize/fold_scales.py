"""Fold per-channel factors and terms behind a convolution or product into its weight and bias.

    BatchNormalization(Conv(x, W, b))     -> Conv(x, W * s, b * s + t)
    Add(Mul(ConvTranspose(x, W), s), t)   -> ConvTranspose(x, W * s, t)
    Mul(MatMul(x, W), s)                  -> MatMul(x, W * s)

This folds batch normalization (Ioffe and Szegedy, arXiv:1502.03167), as one operator or as several, and any
other chain of Add, Sub, Mul and Div with one constant per channel. Weights are scaled lazily.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...analysis.channel_changes import Channels, Vector, change_of_channels
from ...graph.edit import (
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ...graph.lazy import lazy, shape_of
from ..base import EveryGraphPass

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # scaling 16-bit weights would add a rounding error


@dataclass(frozen=True, slots=True)
class _Layer:
    """A convolution or product with a constant weight, and the channel axis of its result."""

    node: ir.Node
    matrix: ir.TensorProtocol
    channels: Channels

    def scaled(self, factors: Vector) -> ir.TensorProtocol:
        """Return the weight with each output channel multiplied by its factor."""
        tensor, shape = self.matrix, shape_of(self.matrix)
        parts, wide = self._along_weight(factors)
        narrow = wide.astype(tensor.dtype.numpy())
        return lazy(lambda: (tensor.numpy().reshape(parts) * narrow).reshape(shape), tensor.dtype, shape)

    def _along_weight(self, factors: Vector) -> tuple[tuple[int, ...], Vector]:
        """Return a shape of the weight, and the factors broadcastable to it."""
        shape = shape_of(self.matrix)
        kernel = [1] * (len(shape) - 2)
        match self.node.op_type:
            case "Conv":
                return shape, factors.reshape(-1, 1, *kernel)
            case "ConvTranspose":  # [inputs, outputs per group, ...]
                group = int_attribute(self.node, "group", 1)
                return (group, shape[0] // group, *shape[1:]), factors.reshape(group, 1, -1, *kernel)
            case "Gemm" if int_attribute(self.node, "transB", 0):
                return shape, factors.reshape(-1, 1)
            case _:
                return shape, factors.reshape(1, -1)

    def bias(self) -> Vector | None:
        """Return the bias, one number per channel; None if it is not constant or has another shape."""
        value = self.node.inputs[2] if len(self.node.inputs) > 2 else None
        if value is None:
            return np.zeros(self.channels.count)
        tensor = weight(value)
        if tensor is None or (tensor.size > 1 and shape_of(tensor)[-1] != self.channels.count):
            return None
        if tensor.size not in (1, self.channels.count):
            return None
        return np.resize(tensor.numpy().astype(np.float64), self.channels.count)


class FoldScalesPass(EveryGraphPass):
    """Fold constant factors and terms of each output channel into the preceding layer.

    Before int8 quantization too: apart, weights would be rounded at scales that the norm undoes
    (B. Jacob et al., https://arxiv.org/abs/1712.05877, section 3.2).
    """

    oldest_opset: ClassVar[int] = 13

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every layer with a constant weight."""
        for node in list(graph):
            layer = _layer(node) if node.graph is graph and not node.domain else None
            if layer is None:
                continue
            chain, factors, terms = _chain(layer)
            if not chain or (node.op_type == "MatMul" and (factors == 1).all()):
                continue
            reason = _misfit(layer, factors, terms)
            if reason is None:
                _fold(graph, layer, chain[-1], factors, terms)
                self.fired += 1
            else:
                self.refuse(node, reason)


def _layer(node: ir.Node) -> _Layer | None:
    matrix = weight(node.inputs[1]) if len(node.inputs) > 1 else None
    if matrix is None or matrix.dtype not in FLOATS or len(matrix.shape) < 2:
        return None
    shape = shape_of(matrix)
    rank = len(shape)
    match node.op_type:
        case "Conv":
            return _Layer(node, matrix, Channels(shape[0], rank - 2, rank))
        case "ConvTranspose":
            return _Layer(node, matrix, Channels(shape[1] * int_attribute(node, "group", 1), rank - 2, rank))
        case "Gemm":
            return _Layer(node, matrix, Channels(shape[0 if int_attribute(node, "transB", 0) else 1], 0, 2))
        case "MatMul" if rank == 2:
            return _Layer(node, matrix, Channels(shape[1], 0, 1))
        case _:
            return None


def _chain(layer: _Layer) -> tuple[list[ir.Node], Vector, Vector]:
    """Return the scaling nodes behind a layer, and their combined factors and terms per channel."""
    factors, terms = np.ones(layer.channels.count), np.zeros(layer.channels.count)
    nodes: list[ir.Node] = []
    value = layer.node.outputs[0]
    while (node := sole_consumer(value)) is not None and node.graph is layer.node.graph:
        change = change_of_channels(node, value, layer.channels)
        if change is None:
            break
        with np.errstate(invalid="ignore"):  # infinite factors are refused later
            factors, terms = factors * change[0], terms * change[0] + change[1]
        nodes.append(node)
        value = node.outputs[0]
    return nodes, factors, terms


def _misfit(layer: _Layer, factors: Vector, terms: Vector) -> str | None:
    node = layer.node
    if not (np.isfinite(factors).all() and np.isfinite(terms).all()):
        return "a factor or term behind it is not finite"
    if node.inputs[1] is not None and len(node.inputs[1].uses()) > 1 and (factors != 1).any():
        return "its weight has other consumers and would be stored twice"
    if node.op_type == "Gemm" and any(float_attribute(node, name, 1.0) != 1 for name in ("alpha", "beta")):
        return "it has alpha or beta other than 1"
    if layer.bias() is None:
        return "its bias is not constant, or not one number per channel"
    return None


def _fold(graph: ir.Graph, layer: _Layer, last: ir.Node, factors: Vector, terms: Vector) -> None:
    node, bias = layer.node, layer.bias()
    x, operand = node.inputs[:2]
    if operand is None or bias is None:
        raise AssertionError("unreachable: weight and bias were checked")
    shift = (bias * factors + terms).astype(layer.matrix.dtype.numpy())
    name = operand.name
    if (factors != 1).any():
        operand = add_initializer(graph, _freed_name(operand), layer.scaled(factors))
    if node.op_type == "MatMul":
        output = insert(last, "MatMul", [x, operand]).outputs[0]
        output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
        if shift.any():
            output = insert(last, "Add", [output, add_initializer(graph, f"{name}.shift", shift)]).outputs[0]
    else:
        inputs = [x, operand, add_initializer(graph, f"{name}.shift", shift)]
        made = insert(last, node.op_type, inputs, node.attributes)
        made.name, output = node.name, made.outputs[0]
    replace(last.outputs[0], output)
    remove_unused(graph, last)


def _freed_name(operand: ir.Value) -> str:
    """Remove a weight without other readers, and return the name that its successor takes.

    Options and reports name layers by their weights.
    """
    if not operand.is_initializer() or operand.is_graph_input() or operand.graph is None:
        return f"{operand.name}.scaled"
    operand.graph.initializers.pop(str(operand.name))
    return str(operand.name)
