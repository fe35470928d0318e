"""Return hidden states, for embeddings, in addition to the logits or instead of them.

    logits = head(norm(x))   ->   logits = head(norm(x)), last_hidden_state = norm(x)
    logits = head(norm(x))   ->   logits = Identity(norm(x))

The first costs nothing if the output is not requested. In the second the output keeps the name ``logits``,
so that lowerings and runners treat the graph as a decoder with a small vocabulary.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import LAST_HIDDEN_STATE, LOGITS
from ....errors import GraphError
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
        if hidden is None or not head or hidden.is_graph_output():
            return
        size = _size(hidden)
        if size is None:
            self.refuse(head[0], "the hidden size is unknown")
            return
        if hidden.dtype not in (None, ir.DataType.FLOAT):
            cast = ir.node("Cast", [hidden], {"to": ir.DataType.FLOAT.value})
            graph.append(cast)
            hidden = cast.outputs[0]
        hidden.name, hidden.type = LAST_HIDDEN_STATE, ir.TensorType(ir.DataType.FLOAT)
        hidden.shape = ir.Shape(["batch", "sequence", size])
        graph.outputs.append(hidden)
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


def _size(hidden: ir.Value) -> int | None:
    """Return the hidden size, from the value's shape or the norm's scale, None if it is unknown."""
    norm = hidden.producer()
    scales = [weight(value) for value in norm.inputs] if norm is not None else []
    known = [tensor.shape[-1] for tensor in scales if tensor is not None and len(tensor.shape)]
    return static_size(hidden, -1) or next((size for size in known if isinstance(size, int)), None)
