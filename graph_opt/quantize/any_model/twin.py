"""Measure the error of each layer's quantized output inside of one graph.

The float graph gets a quantized copy of every layer, which reads the float graph's values. It returns three
small results per layer: the energy of the error, the energy of the float output, and the mean error per
channel. So errors do not include those of earlier layers, and no activation leaves the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....progress import Progress
from ....records import dataclass
from ...graph.onnx_files import read_onnx
from .dynamic import DynamicWriter
from .grid import Floats, Grid
from .layers import Layer, activation_after, find_layers
from .placement import place
from .static import StaticWriter, grid_initializers, grids_of
from .values import Feed, GraphValues

_AXES_ARE_OPERANDS = 18  # since this opset ReduceMean has its axes as an input
Write = Callable[[Layer], ir.Value]


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of the layers of one weight.

    Attributes:
        relative: norm(error) / norm(float output).
        shifts: mean of float minus quantized output, [channels], by the name of a layer's output.
    """

    relative: float
    shifts: Mapping[str, Floats]


def static_errors(
    model: Path,
    feeds: Sequence[Feed],
    grids: Mapping[str, Grid],
    *,
    exclude: Collection[str] = (),
    biases: Mapping[str, Floats] | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerError]:
    """Return the errors that ``StaticGraphPass`` causes in each layer of a saved float graph, by weight.

    Args:
        model: the float graph.
        feeds: samples.
        grids: the grids of all quantized values.
        exclude: weights whose layers stay float.
        biases: see ``StaticGraphPass``.
        progress: called after every sample.
    """
    loaded = read_onnx(model)
    graph = loaded.graph
    layers = [layer for layer in find_layers([graph])[0] if layer.name not in exclude]
    placement = place(graph, layers, carried=())
    known = grids_of(placement, grids)
    writer = StaticWriter(graph, layers, known, dict(biases or {}))

    def rounded(value: ir.Value, before: ir.Node) -> ir.Value:
        parameters = grid_initializers(graph, value, known[value])
        down = ir.node("QuantizeLinear", [value, *parameters])
        up = ir.node("DequantizeLinear", [down.outputs[0], *parameters])
        graph.insert_before(before, [down, up])
        return up.outputs[0]

    def write(layer: Layer) -> ir.Value:
        return writer.write(layer, rounded(layer.x, layer.node))

    return _measure(loaded, layers, write, feeds, model.parent, progress)


def dynamic_errors(
    model: Path,
    feeds: Sequence[Feed],
    operators: Collection[str],
    *,
    exclude: Collection[str] = (),
    progress: Progress | None = None,
) -> dict[str, LayerError]:
    """Return the errors that ``DynamicGraphPass`` causes in each layer of the main graph, by weight."""
    loaded = read_onnx(model)
    layers = [
        layer
        for layer in find_layers([loaded.graph])[0]
        if layer.name not in exclude and layer.node.op_type in operators
    ]
    return _measure(loaded, layers, DynamicWriter(loaded.graph).write, feeds, model.parent, progress)


def _measure(
    model: ir.Model,
    layers: Sequence[Layer],
    write: Write,
    feeds: Sequence[Feed],
    folder: Path,
    progress: Progress | None,
) -> dict[str, LayerError]:
    if not layers:
        return {}
    for node in model.graph:
        node.name = None  # a copy would have its layer's
    watched = [(layer, _watch(model, layer, write(layer))) for layer in layers]
    reader = GraphValues(model, [str(result.name) for _, results in watched for result in results], folder)
    sums: dict[str, list[float]] = {}
    shifts: dict[str, dict[str, Floats]] = {}
    for number, feed in enumerate(feeds):
        found = reader.run(feed)
        for layer, results in watched:
            error, energy, shift = (found[str(result.name)] for result in results)
            total = sums.setdefault(layer.name, [0.0, 0.0])
            total[0] += float(error)
            total[1] += float(energy)
            known = shifts.setdefault(layer.name, {})
            mean: Floats = (shift.reshape(-1) / len(feeds)).astype(np.float32)
            name = str(layer.output.name)
            known[name] = np.add(known[name], mean, dtype=np.float32) if name in known else mean
        if progress is not None:
            progress(number + 1, len(feeds), "layers")
    return {
        name: LayerError(float(np.sqrt(error / max(energy, 1e-30))), shifts[name])
        for name, (error, energy) in sums.items()
    }


def _watch(model: ir.Model, layer: Layer, copy: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Append nodes that compute error energy, float energy and mean error of ``copy``."""
    graph = model.graph

    def append(op_type: str, operands: list[ir.Value], **attributes: int | list[int]) -> ir.Value:
        node = ir.node(op_type, operands, attributes)
        graph.append(node)
        return node.outputs[0]

    shift = _channel_means(model, append("Sub", [layer.output, copy]), layer, append)
    exact = layer.output
    for after in activation_after(layer):
        exact = after.outputs[0]
        copy = append(after.op_type, [copy, *[value for value in after.inputs[1:] if value is not None]])
    error = append("ReduceSumSquare", [append("Sub", [exact, copy])], keepdims=0)
    energy = append("ReduceSumSquare", [exact], keepdims=0)
    for what, value in (("error", error), ("energy", energy), ("shift", shift)):
        value.name = f"{layer.output.name}/{what}"
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return error, energy, shift


def _channel_means(
    model: ir.Model, difference: ir.Value, layer: Layer, append: Callable[..., ir.Value]
) -> ir.Value:
    """Append the mean of ``difference`` over all axes except the channel axis."""
    rank = len(layer.shape)
    if layer.node.op_type == "Conv":
        axes = [0, *range(2, rank)]
        flat = difference
    else:
        shape = ir.tensor(np.array([-1, layer.shape[layer.axis]], np.int64), name=f"{layer.output.name}/rows")
        rows = ir.Value(name=shape.name, type=ir.TensorType(ir.DataType.INT64), const_value=shape)
        model.graph.register_initializer(rows)
        flat, axes = append("Reshape", [difference, rows]), [0]
    if model.opset_imports.get("", 0) < _AXES_ARE_OPERANDS:
        return append("ReduceMean", [flat], axes=axes, keepdims=0)
    content = ir.tensor(np.array(axes, np.int64), name=f"{layer.output.name}/axes")
    operand = ir.Value(name=content.name, type=ir.TensorType(ir.DataType.INT64), const_value=content)
    model.graph.register_initializer(operand)
    return append("ReduceMean", [flat, operand], keepdims=0)
