"""Static int8 quantization: weights per column, activations per tensor with calibrated ranges.

    MatMul(x, W) -> MatMul(DequantizeLinear(QuantizeLinear(x)), DequantizeLinear(Wq))

This is the standard QDQ format: targets with int8 kernels compute the product in integers. B. Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
https://arxiv.org/abs/1712.05877. Zero points are 0, as TensorRT requires. The result of a row does not
depend on other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, shared_constant
from ..algorithms.blockwise import BlockFormat
from ..calibration.calibrators import LEVELS
from .integer_products import IntegerProductsPass


class StaticQuantizationPass(IntegerProductsPass):
    """Compute matrix products in 8-bit integers with calibrated ranges of their inputs.

    Args:
        form: format of the weights that are not multiplied in integers.
        ranges: the largest magnitude to represent, by name of a product's input.
        exclude: weights whose products keep float inputs.
        overrides: other formats of weight-only weights by name; None keeps a weight float.
    """

    def __init__(
        self,
        form: BlockFormat,
        ranges: Mapping[str, float],
        *,
        exclude: Collection[str] = (),
        overrides: Mapping[str, BlockFormat | None] | None = None,
    ) -> None:
        super().__init__(form, exclude=exclude, overrides=overrides)
        self.ranges = ranges

    def misfit(self, x: ir.Value) -> str | None:
        return None if x.name in self.ranges else f"the range of {x.name} is unknown"

    def quantize_input(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> list[ir.Value]:
        scale = np.array(self.ranges[str(x.name)] / LEVELS, np.float32)
        zero = shared_constant(graph, "constants/int8_zero_point", np.array(0, np.int8))
        parameters = [add_initializer(graph, f"{x.name}.scale", scale), zero]
        quantized = insert(node, "QuantizeLinear", [x, *parameters])
        result = insert(node, "DequantizeLinear", [quantized.outputs[0], *parameters])
        quantized.name, result.name = f"{x.name}/QuantizeLinear", f"{x.name}/DequantizeLinear"
        return list(result.outputs)

    def multiply(self, graph: ir.Graph, node: ir.Node, x: list[ir.Value], parts: list[ir.Value]) -> ir.Value:
        dequantized = insert(node, "DequantizeLinear", parts, {"axis": 1})
        product = insert(node, "MatMul", [x[0], dequantized.outputs[0]])
        dequantized.name, product.name = f"{parts[0].name}/DequantizeLinear", node.name
        return product.outputs[0]
