"""A range of a decoder's layers as a graph of its own, so that several targets can share a model.

    whole    ids -> embedding -> layer 0 .. layer k-1 -> layer k .. -> head -> logits
    first    ids -> embedding -> layer 0 .. layer k-1 -> hidden states, under the name ``logits``
    second   ``hidden_states`` -> layer k .. -> head -> logits

Each part keeps ``input_ids`` for its shape, so every lowering and runner takes it for a decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from ...contract import HIDDEN_STATES, INPUT_IDS, LOGITS, PAST, PRESENT
from ...errors import GraphError, UsageError
from ..graph.edit import insert, nodes_of, replace, static_size, weight
from ..passes.base import GraphPass

_CACHE = re.compile(rf"(?:{PAST}|{PRESENT})\.(\d+)\.(?:key|value)")


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer <= self.last


def num_layers(graph: ir.Graph) -> int:
    """Layers with a KV cache."""
    return len(_attentions(graph))


class KeepLayersPass(GraphPass):
    """Cut a canonical decoder graph down to some of its layers; goes in front of a lowering.

    Args:
        layers: which. The first part also embeds, the last one also gives logits.

    Raises:
        UsageError: the graph has no such layers.
        GraphError: more than one value flows from one layer to the next.
    """

    def __init__(self, layers: LayerRange) -> None:
        super().__init__()
        self.layers = layers
        self.name = f"KeepLayers {layers.first}-{layers.last}"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, and drop what only other layers need."""
        result = super().call(model)
        common.RemoveUnusedNodesPass()(model)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace what comes before by an input, and what comes after by an output."""
        attentions = _attentions(graph)
        first, last = self.layers.first, self.layers.last
        if not 0 <= first <= last < len(attentions):
            raise UsageError(f"there are no layers {first}-{last}; the model has 0-{len(attentions) - 1}")
        begin = None if first == 0 else _entrance(graph, attentions, first)
        end = None if last == len(attentions) - 1 else _entrance(graph, attentions, last + 1)
        if end is not None:
            _give_out(graph, end)
        if begin is not None:
            _take_in(graph, begin)
        _measure_kept_cache(graph, self.layers)
        for values in (graph.inputs, graph.outputs):
            for value in list(values):
                cache = _CACHE.fullmatch(str(value.name))
                if cache is not None and int(cache[1]) not in self.layers:
                    values.remove(value)
        self.fired += 1


def _measure_kept_cache(graph: ir.Graph, layers: LayerRange) -> None:
    """Let what takes the sizes of a cache take those of one that stays: masks want its batch and length."""
    caches = {value: _CACHE.fullmatch(str(value.name)) for value in graph.inputs}
    found = [(value, int(match[1]) in layers) for value, match in caches.items() if match is not None]
    kept = next(value for value, stays in found if stays)
    for value in (value for value, stays in found if not stays):
        for node, index in list(value.uses()):
            if node.op_type == "Shape":
                node.replace_input_with(index, kept)


def _attentions(graph: ir.Graph) -> list[ir.Node]:
    """The attention of each layer, by the number of the cache it reads."""
    found = {}
    for node in nodes_of(graph, "Attention"):
        past = node.inputs[4] if len(node.inputs) > 4 else None
        cache = None if past is None else _CACHE.fullmatch(str(past.name))
        if cache is None:
            raise GraphError(f"attention {node.name} reads no cache, so its layer has no number")
        found[int(cache[1])] = node
    if sorted(found) != list(range(len(found))):
        raise GraphError(f"the layers with caches are {sorted(found)}, not one after the other")
    return [found[layer] for layer in sorted(found)]


def _entrance(graph: ir.Graph, attentions: list[ir.Node], layer: int) -> ir.Value:
    """The hidden states that enter ``layer``: the last lone value between the attentions around it."""
    entrance, inside = None, False
    for node, alive in _alive(graph):
        if node is attentions[layer]:
            break
        inside = inside or node is attentions[layer - 1]
        if inside and len(alive) == 1:
            entrance = next(iter(alive))
    if entrance is None:
        raise GraphError(f"more than one value flows from layer {layer - 1} to layer {layer}")
    return entrance


def _alive(graph: ir.Graph) -> Iterator[tuple[ir.Node, set[ir.Value]]]:
    """After each node: the values made from the embedding that later nodes read."""
    flowing: dict[ir.Value, int] = {}  # and how many uses are to come
    for node in graph:
        looked_up = node.op_type == "Gather" and any(_is_ids(value) for value in node.inputs)
        flows = looked_up or any(value in flowing for value in node.inputs if value is not None)
        for value in node.inputs:
            if value is not None and value in flowing:
                flowing[value] -= 1
        if flows:
            flowing |= {value: len(value.uses()) for value in node.outputs}
        yield node, {value for value, uses in flowing.items() if uses}


def _is_ids(value: ir.Value | None) -> bool:
    return value is not None and value.is_graph_input() and value.name == INPUT_IDS


def _give_out(graph: ir.Graph, states: ir.Value) -> None:
    """Let ``states`` be the graph's output ``logits``, in fp32."""
    logits = next((value for value in graph.outputs if value.name == LOGITS), None)
    producer = None if logits is None else logits.producer()
    if logits is None or producer is None:
        raise GraphError("the graph has no output 'logits'; only decoder graphs have layers")
    size = _size(states)
    if states.dtype not in (None, ir.DataType.FLOAT):
        states = insert(producer, "Cast", [states], {"to": int(ir.DataType.FLOAT)}).outputs[0]
    given = insert(producer, "Identity", [states]).outputs[0]  # in the head's place, for lowerings to find
    given.type, given.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "sequence", size])
    replace(logits, given)


def _take_in(graph: ir.Graph, states: ir.Value) -> None:
    """Let ``states`` come from the input ``hidden_states``, in fp32."""
    shape = ir.Shape(["batch", "sequence", _size(states)])
    taken = ir.Value(name=HIDDEN_STATES, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    graph.inputs.append(taken)
    if states.dtype not in (None, ir.DataType.FLOAT):
        taken = insert(graph[0], "Cast", [taken], {"to": int(states.dtype or 0)}).outputs[0]
    replace(states, taken)


def _size(states: ir.Value) -> int:
    """The hidden size: known of the value itself, or of the scale of a norm that reads it."""
    size = static_size(states, -1)
    if size is not None:
        return size
    for node, _ in states.uses():
        scale = weight(node.inputs[1]) if len(node.inputs) > 1 else None
        if "Normalization" in node.op_type and scale is not None:
            return int(scale.shape.numpy()[-1])
    raise GraphError(f"the size of the hidden states {states.name} is unknown")
