"""Return hidden states, for embeddings, in addition to the logits or instead of them.

    logits = head(norm(x))   ->   logits = head(norm(x)), last_hidden_state = norm(x)
    logits = head(norm(x))   ->   logits = head(norm(x)), last_hidden_state = [norm(x), states of layers]
    logits = head(norm(x))   ->   logits = Identity(norm(x))

The first costs nothing if the output is not requested. In the last the output keeps the name ``logits``,
so that lowerings and runners treat the graph as a decoder with a small vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ....contract import LAST_HIDDEN_STATE, LAYER_STATES, LOGITS
from ....errors import GraphError
from ...analysis.layers import num_layers, states_entering
from ...graph.edit import insert, remove_unused, replace, static_size, weight
from ...passes.base import GraphPass
from .logits import find_head


class LastHiddenStatePass(GraphPass):
    """Add the last norm's output, fp32 [batch, sequence, hidden_size], to the outputs.

    Must run before ``SelectLogitsPass``. A graph without a head, such as a part of a split model, is not
    changed.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Add the output."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        hidden, head = find_head(logits) if logits is not None else (None, [])
        if hidden is None or not head or any(value.name == LAST_HIDDEN_STATE for value in graph.outputs):
            return
        size = _size(hidden)
        if size is None:
            self.refuse(head[0], "the hidden size is unknown")
            return
        _make_output(graph, _in_float(graph, hidden), size)
        self.fired += 1


class LayerStatesPass(GraphPass):
    """Add an output with the last norm's output and states that enter layers, one behind the other.

    Draft heads read them. The output is that of ``LastHiddenStatePass``, which leaves it as it is. Must run
    before a lowering. The metadata say how many columns are those of layers.

    Args:
        layers: numbers of layers; that behind the last one means its output.

    Raises:
        UsageError: see ``states_entering``.
        GraphError: the graph has no head, or a size is unknown.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.name = f"LayerStates {', '.join(map(str, layers))}"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the output and the number of columns."""
        result = super().call(model)
        size = static_size(
            next(value for value in model.graph.outputs if value.name == LAST_HIDDEN_STATE), -1
        )
        columns = (size or 0) * len(self.layers) // (1 + len(self.layers))
        model.metadata_props[LAYER_STATES] = str(columns)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Add the output."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        hidden, head = find_head(logits) if logits is not None else (None, [])
        size = None if hidden is None or not head else _size(hidden)
        if hidden is None or size is None:
            raise GraphError("no head was found between the last norm and 'logits', or its size is unknown")
        states = [hidden, *(_entering(graph, layer, hidden) for layer in self.layers)]
        joined = ir.node("Concat", [_in_float(graph, value) for value in states], {"axis": -1})
        graph.append(joined)
        _make_output(graph, joined.outputs[0], size * len(states))
        self.fired += 1


class HiddenStatesPass(GraphPass):
    """Return the last norm's output [batch, sequence, hidden_size] as ``logits``. Must run before a lowering.

    Raises:
        GraphError: the graph has no output ``logits``, or no head.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the logits by the hidden states, and remove the head."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        if logits is None:
            raise GraphError("the graph has no output 'logits'; only decoder graphs have hidden states")
        hidden, head = find_head(logits)
        size = _size(hidden)
        if not head or size is None:
            raise GraphError(f"no head was found between the last norm and 'logits' ({logits.producer()})")
        states = insert(head[-1], "Identity", [hidden]).outputs[0]
        states.shape = ir.Shape(["batch", "sequence", size])
        states.type = logits.type
        replace(logits, states)
        remove_unused(graph, head[-1])
        self.fired += 1


def _entering(graph: ir.Graph, layer: int, hidden: ir.Value) -> ir.Value:
    """Return the states that enter a layer; those behind the last one are what the last norm reads."""
    norm = hidden.producer()
    if norm is not None and norm.inputs[0] is not None and layer == num_layers(graph):
        return norm.inputs[0]
    return states_entering(graph, layer)


def _in_float(graph: ir.Graph, value: ir.Value) -> ir.Value:
    if value.dtype in (None, ir.DataType.FLOAT):
        return value
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT.value})
    graph.append(cast)
    return cast.outputs[0]


def _make_output(graph: ir.Graph, states: ir.Value, size: int) -> None:
    states.name, states.type = LAST_HIDDEN_STATE, ir.TensorType(ir.DataType.FLOAT)
    states.shape = ir.Shape(["batch", "sequence", size])
    graph.outputs.append(states)


def _size(hidden: ir.Value) -> int | None:
    """Return the hidden size, from the value's shape or the norm's scale, None if it is unknown."""
    norm = hidden.producer()
    scales = [weight(value) for value in norm.inputs] if norm is not None else []
    known = [tensor.shape[-1] for tensor in scales if tensor is not None and len(tensor.shape)]
    return static_size(hidden, -1) or next((size for size in known if isinstance(size, int)), None)
