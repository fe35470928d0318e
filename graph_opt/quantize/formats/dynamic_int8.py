"""Dynamic int8 quantization: weights per column in advance, activations per tensor at every run.

    MatMul(x, W) -> Cast(MatMulInteger(DynamicQuantizeLinear(x), Wq)) * (x_scale * W_scale)

One scale is shared by all rows of a run, so the results of a sequence depend slightly on the other sequences.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import insert
from .integer_products import IntegerProductsPass


class DynamicQuantizationPass(IntegerProductsPass):
    """Compute matrix products in 8-bit integers; the range of their inputs is computed at every run."""

    def quantize_input(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> list[ir.Value]:
        return list(insert(node, "DynamicQuantizeLinear", [x], num_outputs=3).outputs)

    def multiply(self, graph: ir.Graph, node: ir.Node, x: list[ir.Value], parts: list[ir.Value]) -> ir.Value:
        (quantized, scale, zero), (values, scales) = x, parts
        product = insert(node, "MatMulInteger", [quantized, values, zero])
        product.name = node.name
        floats = insert(node, "Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT.value})
        both = insert(node, "Mul", [scale, scales])
        return insert(node, "Mul", [floats.outputs[0], both.outputs[0]]).outputs[0]
