"""Static 8-bit quantization: weights per column, activations per tensor, both with ranges known beforehand.

    MatMul(x, W) -> MatMul(DequantizeLinear(QuantizeLinear(x)), DequantizeLinear(Wq))

The standard Q/DQ form: targets with int8 kernels compute the product in integers. B. Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
https://arxiv.org/abs/1712.05877. Zero points are 0, as TensorRT asks. A row's result does not depend on the
rows beside it.
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
    """Compute matrix products in 8-bit integers, the ranges of their inputs measured beforehand.

    Args:
        form: of the weights that are not computed so.
        ranges: the largest magnitude to hold, by the name of a product's input.
        exclude: weights whose products stay in float.
        overrides: other formats of those weights by name; None leaves a weight float, too.
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
        """See ``IntegerProductsPass``."""
        return None if x.name in self.ranges else f"the range of {x.name} is not known"

    def quantize_input(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> list[ir.Value]:
        """See ``IntegerProductsPass``."""
        scale = np.array(self.ranges[str(x.name)] / LEVELS, np.float32)
        zero = shared_constant(graph, "constants/int8_zero_point", np.array(0, np.int8))
        parameters = [add_initializer(graph, f"{x.name}.scale", scale), zero]
        quantized = insert(node, "QuantizeLinear", [x, *parameters])
        result = insert(node, "DequantizeLinear", [quantized.outputs[0], *parameters])
        quantized.name, result.name = f"{x.name}/QuantizeLinear", f"{x.name}/DequantizeLinear"
        return list(result.outputs)

    def multiply(self, graph: ir.Graph, node: ir.Node, x: list[ir.Value], parts: list[ir.Value]) -> ir.Value:
        """See ``IntegerProductsPass``."""
        dequantized = insert(node, "DequantizeLinear", parts, {"axis": 1})
        product = insert(node, "MatMul", [x[0], dequantized.outputs[0]])
        dequantized.name, product.name = f"{parts[0].name}/DequantizeLinear", node.name
        return product.outputs[0]
