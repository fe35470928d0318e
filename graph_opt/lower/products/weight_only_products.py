"""Rewrite products of quantized inputs as products of float inputs with the same int8 weights.

Cast(MatMulInteger(DynamicQuantizeLinear(x), W, W_zero)) * (x_scale * W_scale)
MatMul(DequantizeLinear(QuantizeLinear(x)), DequantizeLinear(W, W_scale))
    -> MatMul(x, DequantizeLinear(W, W_scale, W_zero))

This is for targets without kernels for int8 products, and for kernels that round inputs themselves, in
smaller parts: the result is closer to the original model. Scales are repeated per block, so that kernels for
blocked weights apply.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, nodes_of, remove_unused, replace
from ...graph.lazy import Array, lazy, shape_of
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
    shape = (columns,) if block is None else (rows // block, columns)
    values, scales, zeros = product.values, product.scales, product.zeros
    tensors = {"weight_only": values, "scales": _repeated(scales, shape)}
    if zeros is not None:  # kernels for blocked weights have zero points of unsigned ones
        unsigned = lazy(lambda: _unsigned(values), ir.DataType.UINT8, (rows, columns))
        points = lazy(lambda: _unsigned(zeros), ir.DataType.UINT8, (columns,))
        tensors |= {"weight_only": unsigned, "zero_points": _repeated(points, shape)}
    operands = [add_initializer(graph, f"{product.name}.{name}", tensor) for name, tensor in tensors.items()]
    attributes = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    return insert(node, "DequantizeLinear", operands, attributes).outputs[0]


def _repeated(row: ir.TensorProtocol, shape: tuple[int, ...]) -> ir.LazyTensor:
    return lazy(lambda: np.broadcast_to(row.numpy(), shape), row.dtype, shape)


def _unsigned(values: ir.TensorProtocol) -> Array:
    """Return int8 and 128 more, as uint8."""
    return np.asarray(values.numpy()).view(np.uint8) ^ np.uint8(0x80)
