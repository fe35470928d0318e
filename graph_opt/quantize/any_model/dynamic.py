"""Dynamic int8 quantization of any graph: the range of a layer's input is computed at every run.

    MatMul(x, W) -> Cast(MatMulInteger(DynamicQuantizeLinear(x), Wq)) * (x_scale * W_scale)
    Conv(x, W) -> Cast(ConvInteger(DynamicQuantizeLinear(x), Wq)) * (x_scale * W_scale)

Only standard operators are used. Weights of matrix products are int8. Weights of convolutions are uint8 with
zero point 128, which is equivalent, because onnxruntime's ConvInteger takes 20 times as long for int8. Gemm
becomes MatMul and Add.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import add_initializer, insert, shared_constant
from ...graph.lazy import Array, lazy
from ...passes.base import GraphPass
from .grid import Floats, channel_scales, round_weight
from .layers import Layer, find_layers
from .static import drop_unused_weights, replace_layer

MIDDLE = 128  # zero point of int8 levels stored as uint8


class DynamicGraphPass(GraphPass):
    """Compute layers in 8-bit integers, also in subgraphs, with ranges computed at every run.

    Args:
        exclude: weights whose layers stay float.
        operators: types of layers to quantize.
    """

    oldest_opset: ClassVar[int] = 13  # the first with DequantizeLinear per axis

    def __init__(
        self, *, exclude: Collection[str] = (), operators: Collection[str] = ("Gemm", "MatMul")
    ) -> None:
        super().__init__()
        self.exclude = frozenset(exclude)
        self.operators = frozenset(operators)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite all graphs of a model together, because their weights are in the main graph."""
        self.fired, self.refusals = 0, []
        layers = [layer for layer in find_layers(model.graphs())[0] if self._wants(layer)]
        writer = DynamicWriter(model.graph)
        for layer in layers:
            replace_layer(layer, writer.write(layer))
            self.fired += 1
        drop_unused_weights(layers)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    def rewrite(self, graph: ir.Graph) -> None:
        """Not used: ``call`` rewrites all graphs together."""
        raise NotImplementedError

    def _wants(self, layer: Layer) -> bool:
        return layer.name not in self.exclude and layer.node.op_type in self.operators


class DynamicWriter:
    """Writes layers with dynamically quantized inputs; shared inputs and weights are written once.

    Args:
        graph: the main graph, which holds the weights.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._inputs: dict[tuple[ir.Value, object], list[ir.Value]] = {}
        self._weights: dict[ir.Value, tuple[ir.Value, Floats]] = {}

    def write(self, layer: Layer) -> ir.Value:
        """Insert the quantized layer in front of the float one; return its output including the bias."""
        node = layer.node
        quantized, scale, zero = self._input(layer)
        values, scales = self._weight(layer)
        convolves = node.op_type == "Conv"
        operands = [quantized, values, zero]
        if convolves:
            middle = np.array(MIDDLE, np.uint8)
            operands.append(shared_constant(self._graph, f"constants/uint8_{MIDDLE}", middle))
        product = insert(node, "ConvInteger" if convolves else "MatMulInteger", operands)
        product.name = node.name
        if convolves:
            product.attributes.update(node.attributes)
        floats = insert(node, "Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT.value})
        rank = len(layer.shape) - 1 if convolves else 1  # channels precede the spatial axes
        factor = add_initializer(self._graph, f"{layer.name}.scales", scales.reshape(-1, *[1] * (rank - 1)))
        both = insert(node, "Mul", [scale, factor])
        result = insert(node, "Mul", [floats.outputs[0], both.outputs[0]]).outputs[0]
        bias = layer.bias_content()
        if bias is None:
            return result
        addend = layer.bias
        if convolves or addend is None:
            shaped = bias.reshape(-1, *[1] * (rank - 1))
            addend = add_initializer(self._graph, f"{layer.name}.bias", shaped)
        return insert(node, "Add", [result, addend]).outputs[0]

    def _input(self, layer: Layer) -> list[ir.Value]:
        x = layer.node.inputs[0] or layer.x  # another layer's output may have been replaced
        key = x, layer.node.graph
        if key not in self._inputs:
            node = insert(layer.node, "DynamicQuantizeLinear", [x], num_outputs=3)
            node.name = f"{x.name}/DynamicQuantizeLinear"
            self._inputs[key] = list(node.outputs)
        return self._inputs[key]

    def _weight(self, layer: Layer) -> tuple[ir.Value, Floats]:
        if layer.weight not in self._weights:
            tensor, axis, name = layer.tensor, layer.axis, layer.name
            try:
                scales = channel_scales(tensor.numpy(), axis)
            except GraphError as error:
                raise GraphError(f"weight {name} cannot be quantized: {error}") from error
            if layer.node.op_type == "Conv":
                levels = lazy(
                    lambda: round_weight(tensor.numpy(), axis, scales).view(np.uint8) ^ MIDDLE,
                    ir.DataType.UINT8,
                    layer.shape,
                )
            else:
                shape = layer.shape if axis == 1 else layer.shape[::-1]
                levels = lazy(
                    lambda: _columns(round_weight(tensor.numpy(), axis, scales), axis),
                    ir.DataType.INT8,
                    shape,
                )
            self._weights[layer.weight] = add_initializer(self._graph, f"{name}.values", levels), scales
        return self._weights[layer.weight]


def _columns(levels: Array, axis: int) -> Array:
    """Return a matrix whose columns are the output channels."""
    return levels if axis == 1 else np.ascontiguousarray(levels.T)
