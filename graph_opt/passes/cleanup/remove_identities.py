"""Identity(x) -> x, wherever ONNX lets a graph do without it."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import can_return, replace
from ..base import EveryGraphPass


class RemoveIdentitiesPass(EveryGraphPass):
    """Remove ``Identity`` nodes, in subgraphs and functions too.

    One stays where a graph returns a value that no node of its own makes, or one that it returns already.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite one graph."""
        for node in list(graph):
            if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
                continue
            source, result = node.inputs[0], node.outputs[0]
            if result.is_graph_output() and not can_return(graph, source):
                continue
            replace(result, source)
            graph.remove(node, safe=True)
            self.fired += 1
