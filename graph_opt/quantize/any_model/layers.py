"""Find the layers of a graph that can be computed in 8-bit integers: Conv, Gemm and MatMul with a weight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import constant, float_attribute, int_attribute, sole_consumer, weight
from ...graph.lazy import shape_of
from .grid import Floats

MAX_SUM = 1 << 16  # the sum of 2^16 products of a uint8 and an int8 fits in an int32
_OPERATORS = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """An operator with a constant weight.

    Attributes:
        node: Conv, Gemm or MatMul.
        x: its input.
        weight: its float initializer.
        tensor: the content of the weight.
        axis: the weight's axis of output channels.
        bias: one float per output channel, None if there is none. The bias of a MatMul is added by the next
            node.
        output: the result including the bias, before any activation.
    """

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    tensor: ir.TensorProtocol
    axis: int
    bias: ir.Value | None
    output: ir.Value

    @property
    def name(self) -> str:
        """The weight's name, by which layers are excluded and reported."""
        return str(self.weight.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return shape_of(self.tensor)

    @property
    def summands(self) -> int:
        """Number of products whose sum is one output value."""
        return math.prod(self.shape) // max(1, self.shape[self.axis])

    @property
    def groups(self) -> int:
        """Number of groups of a convolution; 1 for other layers."""
        return int_attribute(self.node, "group", 1) if self.node.op_type == "Conv" else 1

    def bias_content(self) -> Floats | None:
        """Return the bias [channels], None if there is none."""
        tensor = weight(self.bias)
        return None if tensor is None else np.asarray(tensor.numpy(), np.float32)


def find_layers(graphs: Iterable[ir.Graph]) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers of some graphs in order, and by weight why other operators of these types are not.

    All consumers of a weight must be layers with the same channel axis, else the weight would be stored
    twice.
    """
    nodes = [node for graph in graphs for node in graph]
    found: dict[ir.Value, list[Layer]] = defaultdict(list)
    refused: dict[str, str] = {}
    for node in nodes:
        if node.op_type not in _OPERATORS or node.domain:
            continue
        factor = node.inputs[1]
        if factor is None or weight(factor) is None:
            continue
        layer = _layer(node, factor)
        if isinstance(layer, str):
            refused[str(factor.name)] = layer
        else:
            found[factor].append(layer)
    layers: list[Layer] = []
    for factor, readers in found.items():
        readers_agree = len({layer.axis for layer in readers}) == 1
        if not readers_agree or len(readers) < len(list(factor.uses())) or factor.is_graph_output():
            refused[str(factor.name)] = "it has other consumers and would be stored twice"
        elif str(factor.name) not in refused:
            layers += readers
    order = {node: number for number, node in enumerate(nodes)}
    return sorted(layers, key=lambda layer: order[layer.node]), refused


def by_weight(layers: Iterable[Layer]) -> dict[ir.Value, list[Layer]]:
    """Return the layers of each weight."""
    groups: dict[ir.Value, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[layer.weight].append(layer)
    return dict(groups)


def activation_after(layer: Layer) -> Iterator[ir.Node]:
    """Yield the Relu or Clip(min=0) that is the only consumer of a layer's output.

    A uint8 value with zero point 0 cannot be negative, so such a node costs nothing.
    """
    node = sole_consumer(layer.output)
    if node is None or node.domain:
        return
    if node.op_type == "Relu" or (node.op_type == "Clip" and _clips_at_zero(node)):
        yield node


def _clips_at_zero(node: ir.Node) -> bool:
    low = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return low is not None and low.size == 1 and float(low.reshape(-1)[0]) == 0


def _layer(node: ir.Node, factor: ir.Value) -> Layer | str:
    """Return a node's layer, or why it is not a layer."""
    x, tensor = node.inputs[0], weight(factor)
    if x is None or tensor is None or x.is_initializer():
        return "both operands are constants"
    if tensor.dtype != ir.DataType.FLOAT:
        return f"its type is {tensor.dtype.name} instead of FLOAT"
    shape = shape_of(tensor)
    axis = _channel_axis(node, len(shape))
    if isinstance(axis, str):
        return axis
    if math.prod(shape) == 0:
        return "it is empty"
    if math.prod(shape) // shape[axis] > MAX_SUM:
        return f"a sum of more than {MAX_SUM} products can overflow 32 bits"
    bias = _bias(node, shape[axis])
    if isinstance(bias, str):
        return bias
    adding = _bias_node(node) if node.op_type == "MatMul" else None
    return Layer(node, x, factor, tensor, axis, bias, (adding or node).outputs[0])


def _channel_axis(node: ir.Node, rank: int) -> int | str:
    if node.op_type == "Conv":
        return 0
    if rank != 2:
        return "it is not a matrix"
    if node.op_type == "MatMul":
        return 1
    if int_attribute(node, "transA", 0):
        return "the Gemm has transA"
    scaled = any(float_attribute(node, name, 1.0) != 1.0 for name in ("alpha", "beta"))
    if scaled:
        return "the Gemm has alpha or beta other than 1"
    return 0 if int_attribute(node, "transB", 0) else 1


def _bias(node: ir.Node, channels: int) -> ir.Value | str | None:
    if node.op_type == "MatMul":
        adding = _bias_node(node)
        operands = [] if adding is None else [value for value in adding.inputs if value is not None]
        return next((value for value in operands if _is_bias(value, channels)), None)
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None
    return value if _is_bias(value, channels) else "the bias is not a constant with one value per channel"


def _bias_node(node: ir.Node) -> ir.Node | None:
    """Return the node that adds a bias to a MatMul's result."""
    reader, factor = sole_consumer(node.outputs[0]), node.inputs[1]
    tensor = weight(factor)
    if reader is None or reader.op_type != "Add" or reader.domain or tensor is None or len(tensor.shape) != 2:
        return None
    channels = shape_of(tensor)[1]
    return reader if any(_is_bias(value, channels) for value in reader.inputs) else None


def _is_bias(value: ir.Value | None, channels: int) -> bool:
    tensor = weight(value)
    return tensor is not None and shape_of(tensor) == (channels,) and tensor.dtype == ir.DataType.FLOAT
