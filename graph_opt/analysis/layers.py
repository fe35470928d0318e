"""Cut a range of a decoder's layers into a separate graph, to split a model over several targets.

    whole    ids -> embedding -> layer 0 .. layer k-1 -> layer k .. -> head -> logits
    first    ids -> embedding -> layer 0 .. layer k-1 -> hidden states, named ``logits``
    second   ``hidden_states`` -> layer k .. -> head -> logits

Each part keeps the input ``input_ids`` for its shape, so that lowerings and runners treat it as a decoder.
What depends on token ids but on no attention, such as embeddings of each layer, every part computes again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ...contract import HIDDEN_STATES, LOGITS, PAST, PRESENT
from ...errors import GraphError, UsageError
from ..graph.edit import insert, nodes_of, replace, static_size, weight
from ..passes.base import GraphPass
from ..passes.remove_unused import RemoveUnusedNodesPass

_CACHE = re.compile(rf"(?:{PAST}|{PRESENT})\.(\d+)\.(?:key|value)")


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer <= self.last


def num_layers(graph: ir.Graph) -> int:
    """Return the number of layers with attention to a KV cache."""
    return len(_attentions(graph))


def balanced_ranges(graph: ir.Graph, count: int) -> list[LayerRange]:
    """Cut the layers of a decoder into ``count`` ranges whose products take about the same time.

    Layers count by the bytes of weights between one attention and the next, and the last range has the head.
    The largest range is as small as possible (Kernighan, JACM 1971, by dynamic programming).

    Raises:
        UsageError: the model has fewer layers.
    """
    costs = _layer_costs(graph)
    layers = len(costs)
    if not 1 <= count <= layers:
        raise UsageError(f"the model has {layers} layers, which cannot be cut into {count} stages")
    sums = [0, *itertools.accumulate(costs)]
    # By number of layers: the largest range, and where the last one begins; for one range, then for more.
    best = [(sums[end], 0) for end in range(layers + 1)]
    cuts = [best]
    for number in range(1, count):  # ranges before the last one, each of one layer or more
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), cut) for cut in range(number, end)),
                default=(0, 0),
            )
            for end in range(layers + 1)
        ]
        cuts.append(best)
    ranges, end = [], layers
    for known in reversed(cuts):
        ranges.append(LayerRange(known[end][1], end - 1))
        end = known[end][1]
    return ranges[::-1]


def _layer_costs(graph: ir.Graph) -> list[int]:
    """Return the bytes of weights of each layer, the head's with the last layer."""
    owners = {node: layer for layer, node in enumerate(_attentions(graph))}
    parts, part = [0] * (len(owners) + 1), 0
    live = set(graph.inputs)
    for node in graph:
        part = max(part, owners.get(node, -1) + 1)
        if not live.isdisjoint(node.inputs):
            live.update(node.outputs)
            if node.op_type not in ("Gather", "Attention"):
                parts[part] += sum(tensor.nbytes for tensor in _weights(node, live))
    # What is behind an attention, up to the next one, is most of a layer.
    return [max(1, size) for size in parts[1:]]


def _weights(node: ir.Node, live: set[ir.Value]) -> Iterator[ir.TensorProtocol]:
    """Yield the weights of a node, also those that other nodes dequantize or transpose for it."""
    found, waiting = set[ir.Value](), [*node.inputs]
    while waiting:
        value = waiting.pop()
        if value is None or value in live or value in found:
            continue
        found.add(value)
        if (tensor := weight(value)) is not None:
            yield tensor
        elif (producer := value.producer()) is not None:
            waiting += producer.inputs


def states_entering(graph: ir.Graph, layer: int) -> ir.Value:
    """Return the value of the residual stream that enters ``layer``, from 1 on, of a canonical decoder graph.

    Raises:
        UsageError: there is no such layer, or layers without attention.
        GraphError: more than one value connects the layers.
    """
    try:
        attentions = _attentions(graph)
    except GraphError as error:
        raise UsageError(
            f"the states between layers are known only if all have attention: {error}"
        ) from error
    if not 1 <= layer < len(attentions):
        raise UsageError(
            f"the states that enter layer {layer} cannot be read: the graph has {len(attentions)} layers "
            "with attention, and the first one reads the embedding"
        )
    return _layer_input(graph, attentions, layer)


class KeepLayersPass(GraphPass):
    """Keep only a range of layers of a canonical decoder graph; runs before a lowering.

    Args:
        layers: the range. The first part keeps the embedding, the last part the head.

    Raises:
        UsageError: the graph does not have these layers.
        GraphError: more than one value connects a layer to the next.
    """

    def __init__(self, layers: LayerRange) -> None:
        super().__init__()
        self.layers = layers
        self.name = f"KeepLayers {layers.first}-{layers.last}"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, and remove nodes that only other layers need."""
        result = super().call(model)
        RemoveUnusedNodesPass()(model)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace earlier layers by an input, and later ones by an output."""
        attentions = _attentions(graph)
        first, last = self.layers.first, self.layers.last
        if not 0 <= first <= last < len(attentions):
            raise UsageError(
                f"layers {first}-{last} do not exist; the model has layers 0-{len(attentions) - 1}"
            )
        _check_owners(attentions, self.layers)
        begin = None if first == 0 else _layer_input(graph, attentions, first)
        end = None if last == len(attentions) - 1 else _layer_input(graph, attentions, last + 1)
        if end is not None:
            _make_output(graph, end)
        if begin is not None:
            _make_input(graph, begin)
        _redirect_cache_shapes(graph, self.layers)
        for values in (graph.inputs, graph.outputs):
            for value in list(values):
                cache = _CACHE.fullmatch(str(value.name))
                if cache is not None and int(cache[1]) not in self.layers:
                    values.remove(value)
        self.fired += 1


def _redirect_cache_shapes(graph: ir.Graph, layers: LayerRange) -> None:
    """Make Shape nodes read a cache that stays: masks need its batch and length."""
    caches = {value: _CACHE.fullmatch(str(value.name)) for value in graph.inputs}
    found = [(value, int(match[1]) in layers) for value, match in caches.items() if match is not None]
    kept = next(value for value, stays in found if stays)
    for value in (value for value, stays in found if not stays):
        for node, index in list(value.uses()):
            if node.op_type == "Shape":
                node.replace_input_with(index, kept)


def _attentions(graph: ir.Graph) -> list[ir.Node]:
    """Return the Attention of each layer in order: the first reader of each cache, then the other readers."""
    owners: dict[int, ir.Node] = {}
    readers = []
    for node in nodes_of(graph, "Attention"):
        cache = _cache(node)
        if cache is None:
            raise GraphError(f"attention {node.name} does not read a cache, so its layer number is unknown")
        if cache in owners:
            readers.append(node)
        else:
            owners[cache] = node
    if sorted(owners) != list(range(len(owners))):
        raise GraphError(
            f"the layers with caches are {sorted(owners)}; they must be numbered from 0 without gaps"
        )
    return [*(owners[layer] for layer in sorted(owners)), *readers]


def _cache(node: ir.Node) -> int | None:
    """Return the number of the cache that an attention reads: a past, or the present of another layer."""
    names = [str(value.name) for value in [*node.inputs[4:5], *node.inputs[1:2]] if value is not None]
    found = next(filter(None, map(_CACHE.fullmatch, names)), None)
    return None if found is None else int(found[1])


def _check_owners(attentions: list[ir.Node], layers: LayerRange) -> None:
    """Refuse to separate a layer from the one whose cache it reads.

    Raises:
        UsageError: the range has one of them only.
    """
    for layer, node in enumerate(attentions):
        owner = _cache(node)
        if owner is not None and (owner in layers) != (layer in layers):
            raise UsageError(
                f"layers {layers.first}-{layers.last} cannot be a part: layer {layer} reads the keys and "
                f"values of layer {owner}"
            )


def _layer_input(graph: ir.Graph, attentions: list[ir.Node], layer: int) -> ir.Value:
    """Return the hidden states that enter ``layer``.

    That is the last value between the two attentions that is the only live one.
    """
    hidden_states, inside = None, False
    for node, live in _live_values(graph, set(attentions)):
        if node is attentions[layer]:
            break
        inside = inside or node is attentions[layer - 1]
        if inside and len(live) == 1:
            hidden_states = next(iter(live))
    if hidden_states is None:
        raise GraphError(f"more than one value connects layer {layer - 1} to layer {layer}")
    return hidden_states


def _live_values(graph: ir.Graph, attentions: set[ir.Node]) -> Iterator[tuple[ir.Node, set[ir.Value]]]:
    """Yield each node with the live values after it: computed from attention and read by later nodes.

    Keys and values that later layers read too belong to no layer's states.
    """
    uses_left: dict[ir.Value, int] = {}
    for node in graph:
        depends = node in attentions or any(value in uses_left for value in node.inputs if value is not None)
        for value in node.inputs:
            if value is not None and value in uses_left:
                uses_left[value] -= 1
        if depends:
            outputs = node.outputs[:1] if node in attentions else node.outputs
            uses_left |= {value: len(value.uses()) for value in outputs}
        yield node, {value for value, uses in uses_left.items() if uses}


def _make_output(graph: ir.Graph, states: ir.Value) -> None:
    """Make ``states`` the graph output ``logits``, in fp32."""
    logits = next((value for value in graph.outputs if value.name == LOGITS), None)
    producer = None if logits is None else logits.producer()
    if logits is None or producer is None:
        raise GraphError("the graph has no output 'logits'; only decoder graphs can be split by layers")
    size = _size(states)
    if states.dtype not in (None, ir.DataType.FLOAT):
        states = insert(producer, "Cast", [states], {"to": int(ir.DataType.FLOAT)}).outputs[0]
    # Lowerings expect a node in the place of the head.
    given = insert(producer, "Identity", [states]).outputs[0]
    replace(logits, given)
    given.type, given.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "sequence", size])


def _make_input(graph: ir.Graph, states: ir.Value) -> None:
    """Replace ``states`` by the graph input ``hidden_states``, in fp32."""
    shape = ir.Shape(["batch", "sequence", _size(states)])
    taken = ir.Value(name=HIDDEN_STATES, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    graph.inputs.append(taken)
    if states.dtype not in (None, ir.DataType.FLOAT):
        taken = insert(graph[0], "Cast", [taken], {"to": int(states.dtype or 0)}).outputs[0]
    replace(states, taken)


def _size(states: ir.Value) -> int:
    """Return the hidden size, from the value's shape or from the scale of a norm that reads it."""
    size = static_size(states, -1)
    if size is not None:
        return size
    for node, _ in states.uses():
        scale = weight(node.inputs[1]) if len(node.inputs) > 1 else None
        if "Normalization" in node.op_type and scale is not None:
            return int(scale.shape.numpy()[-1])
    raise GraphError(f"the size of the hidden states {states.name} is unknown")
