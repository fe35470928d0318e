"""Identity(x) -> x, wherever ONNX lets a graph do without it."""

from __future__ import annotations

import onnx_ir as ir

from ..edit import replace
from .base import GraphPass


class RemoveIdentitiesPass(GraphPass):
    """Remove ``Identity`` nodes, in subgraphs and functions too.

    One stays where a graph returns a value that no node of its own makes, or one that it returns already.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of ``model``."""
        self.fired, self.refusals = 0, []
        for graph in [*model.graphs(), *(function.graph for function in model.functions.values())]:
            self.rewrite(graph)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite one graph."""
        for node in list(graph):
            if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
                continue
            source, result = node.inputs[0], node.outputs[0]
            if result.is_graph_output() and not _can_return(graph, source):
                continue
            replace(result, source)
            graph.remove(node, safe=True)
            self.fired += 1


def _can_return(graph: ir.Graph, value: ir.Value) -> bool:
    """Return whether ``value`` may become an output of ``graph``, under the output's name."""
    producer = value.producer()
    return producer is not None and producer.graph is graph and not value.is_graph_output()
