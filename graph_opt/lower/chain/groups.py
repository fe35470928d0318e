"""Order a graph so that nodes of one kind come in groups as large as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import onnx_ir as ir


def convex_groups(graph: ir.Graph, wanted: Callable[[ir.Node], bool]) -> list[list[ir.Node]]:
    """Return groups of wanted nodes, each of which can be replaced by one node.

    Other nodes come as early as possible, wanted nodes as late as possible. So no path from a node of a group
    to another leads over a node outside of it.

    Args:
        graph: a graph without subgraphs.
        wanted: whether a node may be part of a group.

    Returns:
        The groups, and the nodes of each, in topological order.
    """
    missing = {node: len(_producers(node)) for node in graph}
    ready = {
        kind: deque(node for node in graph if not missing[node] and wanted(node) is kind)
        for kind in (True, False)
    }
    groups: list[list[ir.Node]] = []
    while ready[True] or ready[False]:
        for kind in (False, True):
            group = []
            while ready[kind]:
                node = ready[kind].popleft()
                group.append(node)
                for reader in dict.fromkeys(use.node for output in node.outputs for use in output.uses()):
                    missing[reader] -= 1
                    if not missing[reader]:
                        ready[wanted(reader)].append(reader)
            if kind and group:
                groups.append(group)
    return groups


def _producers(node: ir.Node) -> set[ir.Node]:
    return {source for value in node.inputs if value is not None and (source := value.producer()) is not None}
