"""Rewrite products of quantized inputs as products of float inputs with the same int8 weights.

Cast(MatMulInteger(DynamicQuantizeLinear(x), W)) * (x_scale * W_scale)
MatMul(DequantizeLinear(QuantizeLinear(x)), DequantizeLinear(W, W_scale))
    -> MatMul(x, DequantizeLinear(W, W_scale))

This is for targets without kernels for int8 products; the result is closer to the original model. Scales are
repeated per block, so that kernels for blocked weights apply.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, nodes_of, remove_unused, replace
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass
from .dynamic_int8 import dynamic_product
from .integer_products import Product
from .static_int8 import static_product, static_readers

_BLOCKS = (128, 64, 32, 16)


class WeightOnlyProductsPass(GraphPass):
    """Make products of quantized inputs read the float inputs.

    Args:
        dynamic: rewrite products of ``DynamicQuantizeLinear``.
        static: rewrite products of ``QuantizeLinear``.
    """

    def __init__(self, *, dynamic: bool = True, static: bool = True) -> None:
        super().__init__()
        self.dynamic, self.static = dynamic, static

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the products that ``DynamicProductsPass`` and ``StaticProductsPass`` would lower."""
        for source in list(nodes_of(graph, "DynamicQuantizeLinear")) if self.dynamic else ():
            for use in list(source.outputs[0].uses()):
                self._rewrite(graph, source, use.node, dynamic_product(source, use.node))
        for source in list(nodes_of(graph, "QuantizeLinear")) if self.static else ():
            for node in static_readers(source):
                self._rewrite(graph, source, node, static_product(node))

    def _rewrite(self, graph: ir.Graph, source: ir.Node, node: ir.Node, match: Product | str) -> None:
        if isinstance(match, str):
            self.refuse(node, match)
            return
        product = insert(node, "MatMul", [source.inputs[0], _dequantized(graph, node, match)]).outputs[0]
        replace(match.scaled, product)
        remove_unused(graph, match.scaled.producer())
        self.fired += 1


def _dequantized(graph: ir.Graph, node: ir.Node, product: Product) -> ir.Value:
    rows, columns = shape_of(product.values)
    block = next((size for size in _BLOCKS if rows % size == 0), None)
    values = add_initializer(graph, f"{product.name}.weight_only", product.values)
    shape = (columns,) if block is None else (rows // block, columns)
    scales = product.scales
    repeated = lazy(lambda: np.broadcast_to(scales.numpy(), shape), scales.dtype, shape)
    operands = [values, add_initializer(graph, f"{product.name}.scales", repeated)]
    attributes = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    return insert(node, "DequantizeLinear", operands, attributes).outputs[0]
