"""Select the activations to quantize: inputs of layers, and values that operators can pass on in integers.

A convolution kernel has integer inputs and outputs, so its output is quantized too, after a Relu if there is
one. Operators that only move elements keep the grid of their input. Sums, products, pools and concatenations
("carried") are computed in integers if all their inputs are quantized anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field

import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import constant, sole_consumer, text_attribute, weight
from .layers import Layer, activation_after

MOVERS = frozenset(
    {
        "DepthToSpace",
        "Flatten",
        "Identity",
        "MaxPool",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
    }
    | {"Transpose", "Unsqueeze"}
)
# Operators that onnxruntime's CPU provider computes in integers.
CARRIED = frozenset({"Add", "AveragePool", "Concat", "GlobalAveragePool", "LeakyRelu", "Mul", "Sigmoid"})
_FLOAT = ir.DataType.FLOAT


@dataclass(slots=True)
class QuantizedValues:
    """The quantized values and the nodes that read them.

    Attributes:
        roots: by quantized value, in order of the graph, the value whose grid it has: itself or its source.
        outputs: values whose consumers all read the quantized form: outputs of convolutions and movers.
        readers: nodes that read quantized values only.
    """

    roots: dict[ir.Value, ir.Value] = field(default_factory=dict)
    outputs: set[ir.Value] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)

    def reads_quantized(self, node: ir.Node, value: ir.Value) -> bool:
        """Return whether a node reads the quantized form of a value."""
        return value in self.outputs or node in self.readers


def place(graph: ir.Graph, layers: Sequence[Layer], carried: Collection[str] = CARRIED) -> QuantizedValues:
    """Return the placement for one graph.

    Args:
        graph: the graph of the layers.
        layers: the layers to compute in integers.
        carried: operators between layers to compute in integers too, if all their inputs are quantized
            anyway.
    """
    ends = [layer_end(layer) for layer in layers if layer.node.op_type == "Conv"]
    wanted = {*ends, *(layer.x for layer in layers)}
    possible = _possible(graph, wanted, carried)
    values = QuantizedValues(outputs=set(ends), readers={layer.node for layer in layers})
    for node in reversed(list(graph)):
        if _is_carried(node, carried):
            result, operands = _result(node), _operands(node)
            fits = bool(operands) and all(value in possible for value in operands)
            if fits and result in wanted and not result.is_graph_output():
                wanted.update(operands)
                values.outputs.add(result)
                values.readers.add(node)
        elif (source := _moved(node)) is not None and any(value in wanted for value in node.outputs):
            wanted.update([source, *(value for value in node.outputs if value.uses())])
            values.outputs.update(value for value in node.outputs if not value.is_graph_output())
            values.readers.add(node)
    for value in [*graph.inputs, *(value for node in graph for value in node.outputs)]:
        if value in wanted:
            maker = value.producer()
            source = _moved(maker) if maker is not None else None
            values.roots[value] = value if source is None else values.roots[source]
    return values


def _possible(graph: ir.Graph, wanted: Collection[ir.Value], carried: Collection[str]) -> set[ir.Value]:
    """Return the values that are quantized, or could be without quantizing further values."""
    values = set(wanted)
    for node in graph:
        source = _moved(node)
        if source is not None and source in values:
            values.update(node.outputs)
        elif (
            _is_carried(node, carried)
            and _operands(node)
            and all(value in values for value in _operands(node))
        ):
            values.update([node.outputs[0], _result(node)])
    return values


def layer_end(layer: Layer) -> ir.Value:
    """Return the output of a convolution's kernel, including a Relu or Clip."""
    after = next(activation_after(layer), None)
    return layer.output if after is None else after.outputs[0]


def _is_carried(node: ir.Node, carried: Collection[str]) -> bool:
    return node.op_type in carried and not node.domain


def _moved(node: ir.Node) -> ir.Value | None:
    """Return the input whose elements a node moves, None for other nodes."""
    if node.op_type not in MOVERS or node.domain or not node.inputs:
        return None
    source = node.inputs[0]
    if node.op_type == "MaxPool" and len(node.outputs) > 1 and node.outputs[1].uses():
        return None
    if node.op_type == "Resize" and text_attribute(node, "mode", "nearest") != "nearest":
        return None
    return None if source is None or source.is_initializer() or source.dtype not in (_FLOAT, None) else source


def _result(node: ir.Node) -> ir.Value:
    """Return a node's output, including a Relu."""
    reader = sole_consumer(node.outputs[0])
    is_relu = reader is not None and reader.op_type == "Relu" and not reader.domain
    return reader.outputs[0] if reader is not None and is_relu else node.outputs[0]


def _operands(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node; [] if one is constant."""
    operands = [value for value in node.inputs if value is not None]
    constants = [value for value in operands if weight(value) is not None or constant(value) is not None]
    return [] if constants else operands
