"""Where a graph's activations are quantized: at the inputs of layers, and wherever integers can travel on.

A convolution's kernel takes and gives integers, so its output is quantized too, behind a Relu. Operators that
only move elements have the grid of what they move. Sums, products, pools and concatenations ("carried") stay
in integers where all they read is quantized anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

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
CARRIED = frozenset(
    {"Add", "AveragePool", "Concat", "GlobalAveragePool", "LeakyRelu", "Mul", "Sigmoid"}
)  # which onnxruntime's CPU provider computes in integers
_FLOAT = ir.DataType.FLOAT


@dataclass(slots=True)
class Placement:
    """Which values are quantized, and who reads them so.

    Attributes:
        roots: by value, in order of the graph, the value whose grid it has: itself or its source.
        outputs: values of which nobody reads the float: what convolutions and movers give.
        readers: nodes that read quantized values only.
    """

    roots: dict[ir.Value, ir.Value] = field(default_factory=dict)
    outputs: set[ir.Value] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)

    def reads_quantized(self, node: ir.Node, value: ir.Value) -> bool:
        """Return whether a node reads a quantized value's rounded form."""
        return value in self.outputs or node in self.readers


def place(graph: ir.Graph, layers: Sequence[Layer], carried: Collection[str] = CARRIED) -> Placement:
    """Decide for one graph.

    Args:
        graph: with the layers.
        layers: what is computed in integers.
        carried: operators between layers that are, too, where all they read is quantized anyway.
    """
    ends = [layer_end(layer) for layer in layers if layer.node.op_type == "Conv"]
    wanted = {*ends, *(layer.x for layer in layers)}
    possible = _possible(graph, wanted, carried)
    found = Placement(outputs=set(ends), readers={layer.node for layer in layers})
    for node in reversed(list(graph)):
        if _is_carried(node, carried):
            result, operands = _result(node), _operands(node)
            fits = bool(operands) and all(value in possible for value in operands)
            if fits and result in wanted and not result.is_graph_output():
                wanted.update(operands)
                found.outputs.add(result)
                found.readers.add(node)
        elif (source := _moved(node)) is not None and any(value in wanted for value in node.outputs):
            wanted.update([source, *(value for value in node.outputs if value.uses())])
            found.outputs.update(value for value in node.outputs if not value.is_graph_output())
            found.readers.add(node)
    for value in [*graph.inputs, *(value for node in graph for value in node.outputs)]:
        if value in wanted:
            maker = value.producer()
            source = _moved(maker) if maker is not None else None
            found.roots[value] = value if source is None else found.roots[source]
    return found


def _possible(graph: ir.Graph, wanted: Collection[ir.Value], carried: Collection[str]) -> set[ir.Value]:
    """Return the values that are quantized, or could be without rounding anything new at the borders."""
    found = set(wanted)
    for node in graph:
        source = _moved(node)
        if source is not None and source in found:
            found.update(node.outputs)
        elif (
            _is_carried(node, carried)
            and _operands(node)
            and all(value in found for value in _operands(node))
        ):
            found.update([node.outputs[0], _result(node)])
    return found


def layer_end(layer: Layer) -> ir.Value:
    """Return what a convolution's kernel can give: its sum, or what an activation makes of it."""
    after = next(activation_after(layer), None)
    return layer.output if after is None else after.outputs[0]


def _is_carried(node: ir.Node, carried: Collection[str]) -> bool:
    return node.op_type in carried and not node.domain


def _moved(node: ir.Node) -> ir.Value | None:
    """Return what a node moves the elements of, None for other nodes."""
    if node.op_type not in MOVERS or node.domain or not node.inputs:
        return None
    source = node.inputs[0]
    if node.op_type == "MaxPool" and len(node.outputs) > 1 and node.outputs[1].uses():
        return None
    if node.op_type == "Resize" and text_attribute(node, "mode", "nearest") != "nearest":
        return None
    return None if source is None or source.is_initializer() or source.dtype not in (_FLOAT, None) else source


def _result(node: ir.Node) -> ir.Value:
    """Return a node's output, or what a Relu makes of it."""
    reader = sole_consumer(node.outputs[0])
    is_relu = reader is not None and reader.op_type == "Relu" and not reader.domain
    return reader.outputs[0] if reader is not None and is_relu else node.outputs[0]


def _operands(node: ir.Node) -> list[ir.Value]:
    """Return what a node computes with; empty if constants among it are no single numbers."""
    operands = [value for value in node.inputs if value is not None]
    constants = [value for value in operands if weight(value) is not None or constant(value) is not None]
    return [] if constants else operands
