"""Lower products of dynamically quantized inputs to com.microsoft DynamicQuantizeMatMul, one per input.

Cast(MatMulInteger(DynamicQuantizeLinear(x), W, W_zero)) * (x_scale * W_scale) + bias
    -> DynamicQuantizeMatMul(x, W, W_scale, W_zero, bias)
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...graph.edit import MICROSOFT, insert, nodes_of, sole_consumer
from ...passes.base import GraphPass
from .integer_products import Product, lower_products, product_of


class DynamicProductsPass(GraphPass):
    """Lower the products of every ``DynamicQuantizeLinear``; those of one input are merged."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower all groups."""
        for source in list(nodes_of(graph, "DynamicQuantizeLinear")):
            products: list[Product] = []
            for use in list(source.outputs[0].uses()):
                product = dynamic_product(source, use.node)
                if isinstance(product, str):
                    self.refuse(use.node, product)
                else:
                    products.append(product)

            def kernel(parts: Sequence[ir.Value], source: ir.Node = source) -> ir.Node:
                operands = [source.inputs[0], *parts]
                return insert(source, "DynamicQuantizeMatMul", operands, domain=MICROSOFT)

            self.fired += lower_products(graph, source, products, kernel)


def dynamic_product(source: ir.Node, node: ir.Node) -> Product | str:
    """Return a product of the output of ``source``, or why no kernel can compute it."""
    if node.op_type != "MatMulInteger" or len(node.inputs) < 3 or node.inputs[2] is not source.outputs[2]:
        return "the quantized input is not multiplied with a weight"
    cast = sole_consumer(node.outputs[0])
    scaling = sole_consumer(cast.outputs[0]) if cast is not None and cast.op_type == "Cast" else None
    if scaling is None or scaling.op_type != "Mul":
        return "the product is not scaled right after it"
    factors = [value.producer() for value in scaling.inputs if value is not None]
    both = next((one for one in factors if one is not None and one.op_type == "Mul"), None)
    if both is None or source.outputs[1] not in both.inputs:
        return "the product is not scaled by the scale of its input"
    scales = next((value for value in both.inputs if value is not source.outputs[1]), None)
    zeros = node.inputs[3] if len(node.inputs) > 3 else None
    return product_of(node, node.inputs[1], scales, scaling.outputs[0], zeros)
