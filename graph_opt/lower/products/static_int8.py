"""Lower products of statically quantized inputs to com.microsoft MatMulIntegerToFloat, one per input.

MatMul(DequantizeLinear(QuantizeLinear(x, s)), DequantizeLinear(W, W_scale)) + bias
    -> MatMulIntegerToFloat(QuantizeLinear(x, s, 128), W, s, W_scale, 128, 0, bias)

The kernel supports int8 activations too, but is tens of times slower with them on x86-64. uint8 with zero
point 128 is equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...graph.edit import MICROSOFT, constant, insert, int_attribute, nodes_of, remove_unused, shared_constant
from ...passes.base import GraphPass
from .integer_products import Product, lower_products, product_of


class StaticProductsPass(GraphPass):
    """Lower the products of every symmetric int8 ``QuantizeLinear``; those of one input are merged."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower all groups."""
        for source in list(nodes_of(graph, "QuantizeLinear")):
            products: list[Product] = []
            for node in static_readers(source):
                product = static_product(node)
                if isinstance(product, str):
                    self.refuse(node, product)
                else:
                    products.append(product)
            if products:
                self.fired += _lower(graph, source, products)


def static_readers(source: ir.Node) -> list[ir.Node]:
    """Return the products that read a QuantizeLinear; [] unless it is symmetric int8 with one scale."""
    scale, zero = (constant(source.inputs[i]) if len(source.inputs) > i else None for i in (1, 2))
    if scale is None or scale.size != 1 or zero is None or zero.dtype != np.int8 or zero.any():
        return []
    pairs = [use.node for use in source.outputs[0].uses() if use.node.op_type == "DequantizeLinear"]
    same = [pair for pair in pairs if list(pair.inputs[1:]) == list(source.inputs[1:])]
    return [
        use.node
        for pair in same
        for use in pair.outputs[0].uses()
        if use.node.op_type == "MatMul" and use.idx == 0
    ]


def static_product(node: ir.Node) -> Product | str:
    """Return a product of ``static_readers``, or why no kernel can compute it."""
    right = node.inputs[1].producer() if node.inputs[1] is not None else None
    if right is None or right.op_type != "DequantizeLinear" or int_attribute(right, "block_size", 0):
        return "the other operand is not an int8 weight"
    zero = constant(right.inputs[2]) if len(right.inputs) > 2 else None
    if zero is not None and zero.any():
        return "the weight has zero points"
    if int_attribute(right, "axis", 1) not in (1, -1):
        return "the weight has no scales per column"
    return product_of(node, right.inputs[0], right.inputs[1], node.outputs[0])


def _lower(graph: ir.Graph, source: ir.Node, products: Sequence[Product]) -> int:
    before = next(node for node in graph if any(node is product.node for product in products))
    middle = shared_constant(graph, "constants/uint8_middle", np.array(128, np.uint8))
    scale = source.inputs[1]
    quantized = insert(source, "QuantizeLinear", [source.inputs[0], scale, middle])
    quantized.name = source.name

    def kernel(parts: Sequence[ir.Value]) -> ir.Node:
        values, scales, zeros, *bias = parts
        operands = [quantized.outputs[0], values, scale, scales, middle, zeros, *bias]
        return insert(before, "MatMulIntegerToFloat", operands, domain=MICROSOFT)

    count = lower_products(graph, before, products, kernel)
    remove_unused(graph, source)
    return count
