"""Static int8 quantization of any graph, in the standard QDQ format.

    Conv(x, W, b) -> Q/DQ(Conv(Q/DQ(x), DequantizeLinear(Wq), b))
    MatMul(x, W) + b -> MatMul(Q/DQ(x), DequantizeLinear(Wq)) + DequantizeLinear(bq)

Targets with int8 kernels compute such layers in integers. B. Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", https://arxiv.org/abs/1712.05877. The bias
of a matrix product is stored as int32, which onnxruntime's kernel requires: with a float bias the product
would be computed in float.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import (
    add_initializer,
    insert,
    remove_unused,
    replace,
    return_instead,
    shared_constant,
)
from ...graph.lazy import lazy
from ...passes.base import GraphPass
from .grid import Floats, Grid, channel_scales, round_bias, round_weight
from .layers import Layer, by_weight, find_layers
from .placement import CARRIED, QuantizedValues, place


class StaticGraphPass(GraphPass):
    """Compute layers in 8-bit integers on calibrated grids.

    Args:
        grids: grids by value name; see ``quantized_values``.
        exclude: weights whose layers stay float.
        carried: operators between layers that are computed in integers too.
        biases: corrected biases, by the name of a layer's output.
    """

    oldest_opset: ClassVar[int] = 13  # that of DequantizeLinear with a scale a channel

    def __init__(
        self,
        grids: Mapping[str, Grid],
        *,
        exclude: Collection[str] = (),
        carried: Collection[str] = CARRIED,
        biases: Mapping[str, Floats] | None = None,
    ) -> None:
        super().__init__()
        self.grids = grids
        self.exclude = frozenset(exclude)
        self.carried = frozenset(carried)
        self.biases = dict(biases or {})

    def rewrite(self, graph: ir.Graph) -> None:
        """Quantize the values, then the layers that read them."""
        layers = [layer for layer in find_layers([graph])[0] if layer.name not in self.exclude]
        placement = place(graph, layers, self.carried)
        known = grids_of(placement, self.grids)
        writer = StaticWriter(graph, layers, known, self.biases)
        rounded = insert_grids(graph, placement, known)
        for layer in layers:
            result = writer.write(layer, rounded[layer.x])
            replace_layer(layer, result)
            self.fired += 1
        drop_unused_weights(layers)


def quantized_values(
    graph: ir.Graph, *, exclude: Collection[str] = (), carried: Collection[str] = CARRIED
) -> list[str]:
    """Return the names of the values whose grids ``StaticGraphPass`` needs."""
    layers = [layer for layer in find_layers([graph])[0] if layer.name not in exclude]
    roots = place(graph, layers, carried).roots.values()
    return list(dict.fromkeys(str(value.name) for value in roots))


class StaticWriter:
    """Writes layers with weights on int8 grids; a weight that several layers share is stored once.

    Args:
        graph: the graph of the layers.
        layers: all layers that will be written.
        grids: the grids of the layers' inputs.
        biases: corrected biases, by the name of a layer's output.
    """

    def __init__(
        self,
        graph: ir.Graph,
        layers: Sequence[Layer],
        grids: Mapping[ir.Value, Grid],
        biases: Mapping[str, Floats],
    ) -> None:
        self._graph = graph
        self._biases = biases
        self._grids = {layer: grids[layer.x] for layer in layers}
        self._weights: dict[ir.Value, ir.Value] = {}
        self._scales = {factor: self._common_scales(group) for factor, group in by_weight(layers).items()}

    def write(self, layer: Layer, x: ir.Value) -> ir.Value:
        """Insert the quantized layer in front of the float one; return its output including the bias.

        Args:
            layer: the float layer.
            x: its quantized and dequantized input.
        """
        node, bias = layer.node, self.bias(layer)
        operands: list[ir.Value] = [x, self._weight(layer)]
        if bias is not None and node.op_type == "Conv":
            operands.append(self._float_bias(layer, bias))
        elif bias is not None and node.op_type == "Gemm":
            operands.append(self._integer_bias(layer, bias))
        copy = insert(node, node.op_type, operands)
        copy.name = node.name
        copy.attributes.update(node.attributes)
        if bias is None or node.op_type != "MatMul":
            return copy.outputs[0]
        return insert(node, "Add", [copy.outputs[0], self._integer_bias(layer, bias)]).outputs[0]

    def bias(self, layer: Layer) -> Floats | None:
        """Return the bias to write, None for none."""
        given = self._biases.get(str(layer.output.name))
        return layer.bias_content() if given is None else given

    def _common_scales(self, group: Sequence[Layer]) -> Floats:
        """Return the scales of a weight, large enough for the int32 biases of all its layers."""
        content = group[0].tensor.numpy()
        try:
            common = [
                channel_scales(
                    content,
                    layer.axis,
                    self.bias(layer),
                    self._grids[layer].scale,
                )
                for layer in group
            ]
        except GraphError as error:
            raise GraphError(f"weight {group[0].name} cannot be quantized: {error}") from error
        scales: Floats = np.max(common, axis=0)
        return scales

    def _weight(self, layer: Layer) -> ir.Value:
        """Return the dequantized weight, inserted in front of the first layer that reads it."""
        factor = layer.weight
        if factor not in self._weights:
            scales, axis, name, tensor = self._scales[factor], layer.axis, layer.name, layer.tensor
            levels = lazy(lambda: round_weight(tensor.numpy(), axis, scales), ir.DataType.INT8, layer.shape)
            zeros = np.zeros(len(scales), np.int8)  # onnxruntime's kernels need them for per-axis scales
            parts = [
                add_initializer(self._graph, f"{name}.values", levels),
                add_initializer(self._graph, f"{name}.scales", scales),
                shared_constant(self._graph, f"constants/int8_zeros_{len(scales)}", zeros),
            ]
            node = insert(layer.node, "DequantizeLinear", parts, {"axis": axis})
            node.name = f"{name}/DequantizeLinear"
            self._weights[factor] = node.outputs[0]
        return self._weights[factor]

    def _float_bias(self, layer: Layer, bias: Floats) -> ir.Value:
        own = layer.bias_content()
        if layer.bias is not None and own is not None and np.array_equal(bias, own):
            return layer.bias
        return add_initializer(self._graph, f"{layer.name}.bias", bias)

    def _integer_bias(self, layer: Layer, bias: Floats) -> ir.Value:
        levels, steps = round_bias(bias, self._grids[layer].scale, self._scales[layer.weight])
        zeros = np.zeros(len(levels), np.int32)
        parts = [
            add_initializer(self._graph, f"{layer.name}.bias.values", levels),
            add_initializer(self._graph, f"{layer.name}.bias.scales", steps),
            shared_constant(self._graph, f"constants/int32_zeros_{len(levels)}", zeros),
        ]
        return insert(layer.node, "DequantizeLinear", parts, {"axis": 0}).outputs[0]


def grids_of(placement: QuantizedValues, grids: Mapping[str, Grid]) -> dict[ir.Value, Grid]:
    """Return the grid of each quantized value.

    Raises:
        GraphError: ``grids`` lacks one.
    """
    unknown = [str(root.name) for root in placement.roots.values() if root.name not in grids]
    if unknown:
        raise GraphError(f"the range of {unknown[0]} is unknown; calibrate it")
    return {value: grids[str(root.name)] for value, root in placement.roots.items()}


def insert_grids(
    graph: ir.Graph, placement: QuantizedValues, grids: Mapping[ir.Value, Grid]
) -> dict[ir.Value, ir.Value]:
    """Insert a QDQ pair behind every value of a placement, and make its readers read the result.

    Returns:
        By value, the output of its pair.
    """
    rounded: dict[ir.Value, ir.Value] = {}
    parameters: dict[ir.Value, list[ir.Value]] = {}
    for value, root in placement.roots.items():
        if root not in parameters:
            parameters[root] = grid_initializers(graph, root, grids[root])
        uses = [use for use in value.uses() if placement.reads_quantized(use.node, value)]
        result = _round(graph, value, parameters[root])
        floats = [use for use in uses if use.node not in placement.readers]
        for use in uses:
            shown = result if use not in floats or len(floats) < 2 else _for_floats(graph, result)
            use.node.replace_input_with(use.idx, shown)
        if value.is_graph_output() and value in placement.outputs:
            return_instead(value, result, f"{value.name}.float")
        rounded[value] = result
    return rounded


def grid_initializers(graph: ir.Graph, value: ir.Value, grid: Grid) -> list[ir.Value]:
    """Register scale and zero point of a grid."""
    kind = grid.dtype.name.lower()
    zero = np.array(grid.zero_point, grid.dtype.numpy())
    return [
        add_initializer(graph, f"{value.name}.scale", np.array(grid.scale, np.float32)),
        shared_constant(graph, f"constants/{kind}_{grid.zero_point}", zero),
    ]


def _round(graph: ir.Graph, value: ir.Value, parameters: list[ir.Value]) -> ir.Value:
    down = ir.node("QuantizeLinear", [value, *parameters])
    up = ir.node("DequantizeLinear", [down.outputs[0], *parameters])
    down.name, up.name = f"{value.name}/QuantizeLinear", f"{value.name}/DequantizeLinear"
    up.outputs[0].type, up.outputs[0].shape = value.type, value.shape
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], [down, up])
    else:
        graph.insert_after(producer, [down, up])
    return up.outputs[0]


def _for_floats(graph: ir.Graph, result: ir.Value) -> ir.Value:
    """Return an Identity of a dequantized value, inserted on first use.

    onnxruntime duplicates a DequantizeLinear for every consumer. That prevents the fusion of activations
    that read a value twice, such as Gelu. An Identity keeps the value shared.
    """
    for use in result.uses():
        if use.node.op_type == "Identity":
            return use.node.outputs[0]
    node, producer = ir.node("Identity", [result]), result.producer()
    node.outputs[0].type, node.outputs[0].shape = result.type, result.shape
    if producer is not None:
        graph.insert_after(producer, node)
    return node.outputs[0]


def replace_layer(layer: Layer, result: ir.Value) -> None:
    """Replace a layer's output by ``result``, which gets its name."""
    output = layer.output
    last, called, graph = output.producer(), output.name, layer.node.graph
    replace(output, result)
    if isinstance(graph, ir.Graph):
        remove_unused(graph, last)
    result.name = called  # keeps the value comparable with the float model's


def drop_unused_weights(layers: Sequence[Layer]) -> None:
    """Remove weights and biases without consumers."""
    for value in {value for layer in layers for value in (layer.weight, layer.bias) if value is not None}:
        owner = value.graph
        if not value.uses() and not value.is_graph_output() and isinstance(owner, ir.Graph):
            del owner.initializers[str(value.name)]
