"""Cut a range of a decoder's layers into a separate graph, to split a model over several targets.

    whole    ids -> embedding -> layer 0 .. layer k-1 -> layer k .. -> head -> logits
    first    ids -> embedding -> layer 0 .. layer k-1 -> hidden states, named ``logits``
    second   ``hidden_states`` -> layer k .. -> head -> logits

A layer is known by the number of its KV cache or recurrent states. Layers that have neither belong to the
one before. Each part keeps the input ``input_ids`` for its shape, so that lowerings and runners treat it as a
decoder. What depends on token ids but on no attention, such as embeddings of each layer, every part computes
again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import onnx_ir as ir

from ...contract import HIDDEN_STATES, LOGITS, PAST, PRESENT, STATE_KINDS
from ...errors import GraphError, UsageError
from ...records import dataclass
from ..graph.edit import insert, replace, static_size, weight
from ..passes.base import GraphPass
from ..passes.remove_unused import RemoveUnusedNodesPass

_CACHE = re.compile(rf"(?:{PAST}|{PRESENT})\.(\d+)\.(?:key|value)")
_STATE = re.compile(rf"(?:past|present)_(?:{'|'.join(STATE_KINDS)})\.(\d+)")


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer <= self.last


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer, for cutting a model.

    Args:
        number: of its cache or states.
        size: bytes of weights from here to the next layer.
        cached: whether it has a KV cache.
    """

    number: int
    size: int
    cached: bool = True


def num_layers(graph: ir.Graph) -> int:
    """Return the number of layers up to the last one that has a KV cache or states.

    Raises:
        GraphError: the layers of attention are not known.
    """
    return max(_layers(graph), default=-1) + 1


def balanced_ranges(graph: ir.Graph, count: int) -> list[LayerRange]:
    """Cut the layers of a decoder into ``count`` ranges whose products take about the same time.

    Layers count by the bytes of weights between one attention or state and the next, and the last range has
    the head. The largest range is as small as possible (Kernighan, JACM 1971, by dynamic programming). Each
    has a KV cache, as runners need one.

    Raises:
        UsageError: the model has fewer layers with one.
    """
    layers = layer_costs(graph)
    total, cached = len(layers), sum(layer.cached for layer in layers)
    if not 1 <= count <= cached:
        raise UsageError(f"the model has {cached} layers with KV, which cannot be cut into {count} stages")
    sums = [0, *itertools.accumulate(layer.size for layer in layers)]
    caches = [0, *itertools.accumulate(layer.cached for layer in layers)]

    def size(begin: int, end: int) -> float:
        return sums[end] - sums[begin] if caches[end] > caches[begin] else float("inf")

    # By number of layers: the largest range, and where the last one begins; for one range, then for more.
    best = [(size(0, end), 0) for end in range(total + 1)]
    cuts = [best]
    for number in range(1, count):  # ranges before the last one, each of one layer or more
        best = [
            min(
                ((max(best[cut][0], size(cut, end)), cut) for cut in range(number, end)),
                default=(float("inf"), 0),
            )
            for end in range(total + 1)
        ]
        cuts.append(best)
    begins, end = [], total
    for known in reversed(cuts):
        end = known[end][1]
        begins.append(end)
    firsts = [0, *(layers[begin].number for begin in begins[-2::-1])]
    lasts = [first - 1 for first in firsts[1:]] + [layers[-1].number]
    return [LayerRange(first, last) for first, last in zip(firsts, lasts, strict=True)]


def layer_costs(graph: ir.Graph) -> list[LayerCost]:
    """Return the layers in order, the head's weights with the last one."""
    mixers = _layers(graph)
    owners = {node: place for place, node in enumerate(mixers.values())}
    cached = {number for value in graph.inputs if (number := _number(value, _CACHE)) is not None}
    parts, part = [0] * (len(owners) + 1), 0
    live = set(graph.inputs)
    for node in graph:
        part = max(part, owners.get(node, -1) + 1)
        if not live.isdisjoint(node.inputs):
            live.update(node.outputs)
            if node.op_type not in ("Gather", "Attention"):
                parts[part] += sum(tensor.nbytes for tensor in _weights(node, live))
    # What is behind an attention, up to the next one, is most of a layer.
    return [
        LayerCost(number, max(1, size), number in cached or node.op_type == "Attention")
        for (number, node), size in zip(mixers.items(), parts[1:], strict=True)
    ]


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
        UsageError: there is no such layer, or its number is not known because it has neither cache nor state.
        GraphError: more than one value connects the layers.
    """
    mixers = _layers(graph)
    if layer not in mixers or layer == min(mixers):
        raise UsageError(
            f"the states that enter layer {layer} cannot be read: the graph has {num_layers(graph)} layers, "
            "of which the first one reads the embedding, and those without a cache or state are not known"
        )
    return _layer_input(graph, mixers, layer)


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
        mixers = _layers(graph)
        first, last = self.layers.first, self.layers.last
        if not 0 <= first <= last < num_layers(graph):
            raise UsageError(
                f"layers {first}-{last} do not exist; the model has layers 0-{num_layers(graph) - 1}"
            )
        own = [number for number in mixers if number in self.layers]
        if not any(_number(value, _CACHE) in own for value in graph.inputs):
            raise UsageError(f"layers {first}-{last} cannot be a part: none of them has a KV cache")
        _check_owners(mixers, self.layers)
        behind = [number for number in mixers if number > last]
        begin = None if own[0] == min(mixers) else _layer_input(graph, mixers, own[0])
        end = _layer_input(graph, mixers, behind[0]) if behind else None
        if end is not None:
            _make_output(graph, end)
        if begin is not None:
            _make_input(graph, begin)
        _redirect_cache_shapes(graph, self.layers)
        for values in (graph.inputs, graph.outputs):
            for value in list(values):
                number = _memory(value)
                if number is not None and number not in self.layers:
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


def _number(value: ir.Value | None, names: re.Pattern[str]) -> int | None:
    """Return the number of the layer in the name of a value, None if it has another name."""
    match = names.fullmatch(str(value.name)) if value is not None else None
    return None if match is None else int(match[1])


def _memory(value: ir.Value | None) -> int | None:
    """Return the number of the layer whose cache or state a value is, None if it is neither."""
    number = _number(value, _CACHE)
    return _number(value, _STATE) if number is None else number


def _layers(graph: ir.Graph) -> dict[int, ir.Node]:
    """Return the first node of each layer that reads its cache or state, by number, in order.

    Layers that read the cache of others follow, in the order of the graph.

    Raises:
        GraphError: an attention reads no cache, or layers with attention alone are not numbered from 0.
    """
    owners: dict[int, ir.Node] = {}
    attended, readers = set[int](), list[ir.Node]()
    for node in graph:
        if node.op_type == "Attention" and not node.domain:
            number = _cache(node)
            if number is None:
                raise GraphError(
                    f"attention {node.name} does not read a cache, so its layer number is unknown"
                )
            if number in attended:
                readers.append(node)
                continue
            attended.add(number)
        else:
            number = next((own for value in node.inputs if (own := _number(value, _STATE)) is not None), None)
        if number is not None:
            owners.setdefault(number, node)
    if owners.keys() == attended and sorted(owners) != list(range(len(owners))):
        raise GraphError(
            f"the layers with caches are {sorted(owners)}; they must be numbered from 0 without gaps"
        )
    known = {number: owners[number] for number in sorted(owners)}
    return known | {max(known) + 1 + place: node for place, node in enumerate(readers)}


def _cache(node: ir.Node) -> int | None:
    """Return the number of the cache that an attention reads: a past, or the present of another layer."""
    numbers = (_number(value, _CACHE) for value in [*node.inputs[4:5], *node.inputs[1:2]])
    return next((number for number in numbers if number is not None), None)


def _check_owners(mixers: dict[int, ir.Node], layers: LayerRange) -> None:
    """Refuse to separate a layer from the one whose cache it reads.

    Raises:
        UsageError: the range has one of them only.
    """
    for layer, node in mixers.items():
        owner = _cache(node) if node.op_type == "Attention" else None
        if owner is not None and (owner in layers) != (layer in layers):
            raise UsageError(
                f"layers {layers.first}-{layers.last} cannot be a part: layer {layer} reads the keys and "
                f"values of layer {owner}"
            )


def _layer_input(graph: ir.Graph, mixers: dict[int, ir.Node], layer: int) -> ir.Value:
    """Return the hidden states that enter ``layer``.

    That is the last value between its attention or state and the one before that is the only live one.
    """
    before = max(number for number in mixers if number < layer)
    hidden_states, inside = None, False
    for node, live in _live_values(graph, set(mixers.values())):
        if node is mixers[layer]:
            break
        inside = inside or node is mixers[before]
        if inside and len(live) == 1:
            hidden_states = next(iter(live))
    if hidden_states is None:
        raise GraphError(f"more than one value connects layer {before} to layer {layer}")
    return hidden_states


def _live_values(graph: ir.Graph, mixers: set[ir.Node]) -> Iterator[tuple[ir.Node, set[ir.Value]]]:
    """Yield each node with the live values after it: computed from attention or states, read by later nodes.

    Keys and values that later layers read too belong to no layer's states.
    """
    uses_left: dict[ir.Value, int] = {}
    for node in graph:
        depends = node in mixers or any(value in uses_left for value in node.inputs if value is not None)
        for value in node.inputs:
            if value is not None and value in uses_left:
                uses_left[value] -= 1
        if depends:
            outputs = node.outputs[:1] if node in mixers else node.outputs
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
