"""Put the nodes of the branch that a constant condition takes in the place of its ``If``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import ClassVar

import onnx_ir as ir

from ...graph.edit import constant, nodes_of, replace
from ..base import EveryGraphPass


class InlineBranchesPass(EveryGraphPass):
    """Put the nodes of the branch that a constant condition takes in the place of its ``If``.

    onnxruntime 1.32 does so too, but forgets what the branch reads of the outer graph: a value that nothing
    else reads is removed, and the session ends with "Node input ... is not a graph input".
    """

    oldest_opset: ClassVar[int] = 0

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite one graph."""
        nodes = deque(nodes_of(graph, "If"))
        names = Counter(value.name for value in _values(graph)) if nodes else Counter()
        while nodes:
            node = nodes.popleft()
            condition = node.inputs[0]
            chosen = None if condition is None or condition.is_graph_input() else constant(condition)
            if chosen is None or chosen.size != 1:
                continue
            branch = node.attributes["then_branch" if chosen.item() else "else_branch"].as_graph()
            nodes.extend(each for each in _inline(graph, node, branch, names) if each.op_type == "If")
            self.fired += 1


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph, names: Counter[str | None]) -> list[ir.Node]:
    """Move the nodes and weights of a branch in front of its node, remove the node, and return the nodes."""
    results, weights, nodes = list(branch.outputs), list(branch.initializers.values()), list(branch)
    branch.outputs.clear()
    branch.initializers.clear()
    branch.remove(nodes)
    for value in (*weights, *(output for each in nodes for output in each.outputs)):
        if names[value.name] > 1:  # branches may share names
            value.name = f"{value.name}_inlined"
            while value.name in names:
                value.name += "_"
            names[value.name] += 1
    for weight in weights:
        graph.register_initializer(weight)
    graph.insert_before(node, nodes)
    for old, new in zip(node.outputs, results, strict=True):
        replace(old, new)
    graph.remove(node, safe=True)
    return nodes


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    """Yield the values of a graph and of its subgraphs."""
    for each in (graph, *graph.subgraphs()):
        yield from each.inputs
        yield from each.initializers.values()
        for node in each:
            yield from node.outputs
