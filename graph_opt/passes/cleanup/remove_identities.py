"""Remove Identity nodes, and Dropout nodes outside of training, where ONNX's rules for outputs allow it."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from ...graph.edit import can_return, constant, replace
from ..base import EveryGraphPass


class RemoveIdentitiesPass(EveryGraphPass):
    """Remove ``Identity`` and inference-time ``Dropout`` nodes, in subgraphs and functions too.

    A node stays if a graph would otherwise return a value without a node of its own, or the same value twice.
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
    """Return whether a node returns its input unchanged."""
    if node.domain or node.op_type not in ("Identity", "Dropout"):
        return False
    if node.op_type == "Identity":
        return True
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return False
    training = node.inputs[2] if len(node.inputs) > 2 else None
    state = constant(training)
    return training is None or (state is not None and not state.any())
