"""Measure the effect of quantizing a single layer on a model's outputs.

The float graph gets a quantized copy of every layer, and a boolean graph input per weight that selects the
copy. So one session is enough for all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....progress import Progress
from ...graph.edit import return_instead
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from .grid import Floats, Grid
from .layers import Layer, by_weight, find_layers
from .placement import layer_end, place
from .static import StaticWriter, grid_initializers, grids_of
from .values import Feed, GraphValues

_SMALLEST = 1e-30


def output_noise(
    model: Path,
    feeds: Sequence[Feed],
    grids: Mapping[str, Grid],
    *,
    exclude: Collection[str] = (),
    biases: Mapping[str, Floats] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure each weight of a saved float graph.

    Args:
        model: the float graph.
        feeds: samples.
        grids: the grids of all quantized values.
        exclude: weights whose layers stay float.
        biases: see ``StaticGraphPass``.
        progress: called after every layer.

    Returns:
        By weight, the energy of the error relative to that of the output, for the worst output.
    """
    loaded = read_onnx(model)
    outputs = [str(output.name) for output in loaded.graph.outputs]
    switches = _add_switches(loaded, grids, frozenset(exclude), dict(biases or {}))
    reader = GraphValues(loaded, outputs, model.parent)
    off = {name: np.array(False) for name in switches.values()}
    exact = [reader.run({**feed, **off}) for feed in feeds]
    noise: dict[str, float] = {}
    for number, (weight, switch) in enumerate(switches.items()):
        on = {**off, switch: np.array(True)}
        noise[weight] = _noise(exact, [reader.run({**feed, **on}) for feed in feeds])
        if progress is not None:
            progress(number + 1, len(switches), weight)
    return noise


def _add_switches(
    model: ir.Model, grids: Mapping[str, Grid], exclude: Collection[str], biases: Mapping[str, Floats]
) -> dict[str, str]:
    """Add quantized copies and switches to a graph; return the names of the switches by weight."""
    graph = model.graph
    for node in graph:
        node.name = None  # copies would have the same names
    layers = [layer for layer in find_layers([graph])[0] if layer.name not in exclude]
    placement = place(graph, layers, carried=())
    known = grids_of(placement, grids)
    writer = StaticWriter(graph, layers, known, biases)
    ends = {layer: layer_end(layer) for layer in layers if layer.node.op_type == "Conv"}
    names: dict[str, str] = {}
    for number, (factor, group) in enumerate(by_weight(layers).items()):
        switch = ir.Value(
            name=f"carryall/switch_{number}", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])
        )
        graph.inputs.append(switch)
        names[str(factor.name)] = str(switch.name)
        for layer in group:
            x = layer.node.inputs[0] or layer.x  # the selected output of the layer before
            copy = writer.write(layer, _rounded(graph, x, known[layer.x], layer.node))
            if layer in ends:
                copy = _rounded(graph, copy, known[ends[layer]], layer.node)
            _choose(graph, switch, copy, layer)
    return names


def _rounded(graph: ir.Graph, value: ir.Value, grid: Grid, before: ir.Node) -> ir.Value:
    parameters = grid_initializers(graph, value, grid)
    down = ir.node("QuantizeLinear", [value, *parameters])
    up = ir.node("DequantizeLinear", [down.outputs[0], *parameters])
    graph.insert_before(before, [down, up])
    return up.outputs[0]


def _choose(graph: ir.Graph, switch: ir.Value, copy: ir.Value, layer: Layer) -> None:
    output = layer.output
    node = ir.node("Where", [switch, copy, output])
    maker = output.producer()
    if maker is None:
        return
    graph.insert_after(maker, node)
    result = node.outputs[0]
    for use in list(output.uses()):
        if use.node is not node:
            use.node.replace_input_with(use.idx, result)
    if output.is_graph_output():
        result.type, result.shape = output.type, output.shape
        return_instead(output, result, f"{output.name}.float")


def _noise(exact: Sequence[Mapping[str, Array]], found: Sequence[Mapping[str, Array]]) -> float:
    worst = 0.0
    for name in exact[0]:
        pairs = [(a[name].astype(np.float64), b[name]) for a, b in zip(exact, found, strict=True)]
        if exact[0][name].dtype.kind == "f" and all(a.shape == b.shape for a, b in pairs):
            error = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
            worst = max(worst, error / max(sum(float((a**2).sum()) for a, _ in pairs), _SMALLEST))
    return worst
