"""Identity(x) -> x, and Dropout(x) outside of training, wherever ONNX lets a graph do without it."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from ...graph.edit import can_return, constant, replace
from ..base import EveryGraphPass


class RemoveIdentitiesPass(EveryGraphPass):
    """Remove ``Identity`` nodes and idle ``Dropout``, in subgraphs and functions too.

    One stays where a graph returns a value that no node of its own makes, or one that it returns already.
    """

    oldest_opset: ClassVar[int] = 0

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite one graph."""
        for node in list(graph):
            source = node.inputs[0] if node.inputs else None
            if source is None or not _passes_on(node):
                continue
            result = node.outputs[0]
            if result.is_graph_output() and not can_return(graph, source):
                continue
            replace(result, source)
            graph.remove(node, safe=True)
            self.fired += 1


def _passes_on(node: ir.Node) -> bool:
    """Return whether a node returns what it reads."""
    if node.domain or node.op_type not in ("Identity", "Dropout"):
        return False
    if node.op_type == "Identity":
        return True
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return False
    training = node.inputs[2] if len(node.inputs) > 2 else None
    state = constant(training)
    return training is None or (state is not None and not state.any())
