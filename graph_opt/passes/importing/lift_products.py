"""Replace onnxruntime's operators of products by standard ones.

FusedMatMul becomes Transpose, MatMul and Mul; weights are transposed lazily. DynamicQuantizeMatMul and
MatMulIntegerToFloat become DynamicQuantizeLinear and MatMulInteger.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import transpose
from ..base import GraphPass


class LiftProductsPass(GraphPass):
    """Replace FusedMatMul, DynamicQuantizeMatMul and MatMulIntegerToFloat."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every node, of FusedMatMul those that do not transpose batch axes."""
        for node in nodes_of(graph, "DynamicQuantizeMatMul", MICROSOFT):
            rounded = insert(node, "DynamicQuantizeLinear", node.inputs[:1], num_outputs=3).outputs
            weights, scales, zeros, bias = [*node.inputs, None, None][1:5]
            operands = [rounded[0], weights, rounded[2], zeros]
            self._finish(graph, node, integer_product(node, operands, rounded[1], scales), bias)
        for node in nodes_of(graph, "MatMulIntegerToFloat", MICROSOFT):
            x, weights, scale, scales, zero, zeros, bias = [*node.inputs, None, None, None][:7]
            self._finish(graph, node, integer_product(node, [x, weights, zero, zeros], scale, scales), bias)
        for node in nodes_of(graph, "FusedMatMul", MICROSOFT):
            if any(int_attribute(node, name, 0) for name in ("transBatchA", "transBatchB")):
                self.refuse(node, "it transposes batch axes")
                continue
            operands = [
                _transposed(graph, node, value) if int_attribute(node, name, 0) else value
                for name, value in zip(("transA", "transB"), node.inputs, strict=True)
            ]
            if operands[0] is None or operands[1] is None:
                self.refuse(node, "the rank of a transposed operand is unknown")
                continue
            output = insert(node, "MatMul", operands).outputs[0]
            alpha = float_attribute(node, "alpha", 1.0)
            if alpha != 1.0:
                factor = shared_constant(graph, f"alpha.{alpha!r}", np.array(alpha, np.float32))
                output = insert(node, "Mul", [output, factor]).outputs[0]
            replace(node.outputs[0], output)
            remove_unused(graph, node)
            self.fired += 1

    def _finish(self, graph: ir.Graph, node: ir.Node, product: ir.Value, bias: ir.Value | None) -> None:
        if bias is not None:
            product = insert(node, "Add", [product, bias]).outputs[0]
        replace(node.outputs[0], product)
        remove_unused(graph, node)
        self.fired += 1


def integer_product(
    before: ir.Node, operands: list[ir.Value | None], scale: ir.Value | None, scales: ir.Value | None
) -> ir.Value:
    """Return the float product of an input that is rounded and a weight of integers.

    Args:
        before: new nodes are inserted in front of it.
        operands: those of MatMulInteger: the input, the weight, and their zero points or None.
        scale: of the input.
        scales: of the weight.
    """
    while operands[-1] is None:
        operands = operands[:-1]
    product = insert(before, "MatMulInteger", operands).outputs[0]
    floats = insert(before, "Cast", [product], {"to": ir.DataType.FLOAT}).outputs[0]
    both = insert(before, "Mul", [scale, scales]).outputs[0]
    return insert(before, "Mul", [floats, both]).outputs[0]


def _transposed(graph: ir.Graph, node: ir.Node, value: ir.Value | None) -> ir.Value | None:
    """Return a value with its last two axes swapped, None if its rank is unknown."""
    tensor = weight(value)
    if value is not None and tensor is not None and len(tensor.shape) == 2:
        name = f"{value.name}.transposed"
        return graph.initializers.get(name) or add_initializer(graph, name, transpose(tensor))
    if value is None or value.shape is None:
        return None
    rank = len(value.shape)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    return insert(node, "Transpose", [value], {"perm": perm}).outputs[0]
