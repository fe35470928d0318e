"""Products of dynamically quantized inputs -> the same int8 weights with float inputs.

Cast(MatMulInteger(DynamicQuantizeLinear(x), W)) * (x_scale * W_scale)
    -> MatMul(x, DequantizeLinear(W, W_scale))

For targets that have no kernel for the former; the latter is closer to the original model. Scales are
repeated a block, so that kernels for blocked weights apply.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..edit import add_initializer, insert, nodes_of, remove_unused, replace
from ..lazy import lazy, shape_of
from ..passes.base import GraphPass
from .dynamic_int8 import dynamic_product

_BLOCKS = (128, 64, 32, 16)


class WeightOnlyProductsPass(GraphPass):
    """Let the products of every ``DynamicQuantizeLinear`` read its input instead."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite what ``DynamicProductsPass`` would."""
        for source in list(nodes_of(graph, "DynamicQuantizeLinear")):
            for use in list(source.outputs[0].uses()):
                found = dynamic_product(source, use.node)
                if isinstance(found, str):
                    self.refuse(use.node, found)
                    continue
                node, scaled = use.node, found.scaled
                weight = _dequantized(graph, node, found.scales)
                product = insert(node, "MatMul", [source.inputs[0], weight]).outputs[0]
                replace(scaled, product)
                remove_unused(graph, scaled.producer())
                self.fired += 1


def _dequantized(graph: ir.Graph, node: ir.Node, scales: ir.TensorProtocol) -> ir.Value:
    values = node.inputs[1]
    if values is None or values.const_value is None:
        raise AssertionError("unreachable: dynamic_product checked the weight")
    rows, columns = shape_of(values.const_value)
    block = next((size for size in _BLOCKS if rows % size == 0), None)
    name = f"{values.name}.scales"
    if block is None:
        whole = lazy(lambda: np.broadcast_to(scales.numpy().reshape(-1), columns), scales.dtype, (columns,))
        operands = [values, add_initializer(graph, name, whole)]
        return insert(node, "DequantizeLinear", operands, {"axis": 1}).outputs[0]
    shape = (rows // block, columns)
    repeated = lazy(lambda: np.broadcast_to(scales.numpy().reshape(-1), shape), scales.dtype, shape)
    operands = [values, add_initializer(graph, name, repeated)]
    return insert(node, "DequantizeLinear", operands, {"axis": 0, "block_size": block}).outputs[0]
