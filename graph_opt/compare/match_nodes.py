"""Match the nodes of two graphs by structure, not by name.

Nodes are matched in this order: equal upstream and downstream; equal weights; equal in one direction;
neighbours of matched nodes with the same operator. So a change in one place, or in every layer, leaves all
other nodes matched.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

import onnx_ir as ir

from .structural_hash import Seeds, backward_hashes, forward_hashes, weight_hash

Pairs = list[tuple[ir.Value, ir.Value]]
Key = Callable[[ir.Node], Hashable | None]


class NodeMatching:
    """A one-to-one matching of nodes of ``a`` with nodes of ``b``.

    Attributes:
        pairs: from nodes of ``a`` to nodes of ``b``.
        values: from values of ``a`` to values of ``b``: graph inputs, and outputs of matched nodes.
    """

    def __init__(self, a: ir.Graph, b: ir.Graph, inputs: Pairs) -> None:
        self.pairs: dict[ir.Node, ir.Node] = {}
        self.values: dict[ir.Value, ir.Value] = dict(inputs)
        self._taken: set[ir.Node] = set()
        self._graphs = (a, b)
        self._a = [node for node in a if node.op_type != "Constant"]
        self._b = [node for node in b if node.op_type != "Constant"]

    def equal(self, key: Key) -> None:
        """Match nodes with equal keys, in order; a key of None matches nothing."""
        waiting: dict[Hashable, deque[ir.Node]] = defaultdict(deque)
        for node in self._b:
            if node not in self._taken and (label := key(node)) is not None:
                waiting[label].append(node)
        for node in self._a:
            label = key(node) if node not in self.pairs else None
            if label is not None and waiting.get(label):
                self._match(node, waiting[label].popleft())

    def neighbours(self, outputs: Pairs) -> None:
        """Match producers and consumers of matched nodes and outputs, if their operators are equal."""
        near = [*_producers(outputs), *_readers(list(self.values.items()))]
        queue = deque([*near, *(pair for a, b in self.pairs.items() for pair in _near(a, b))])
        while queue:
            left, right = queue.popleft()
            if self._free(left, right):
                self._match(left, right)
                queue.extend(_near(left, right))

    def unmatched(self) -> tuple[list[ir.Node], list[ir.Node]]:
        """Return the nodes that only ``a`` has, and those that only ``b`` has."""
        return (
            [node for node in self._a if node not in self.pairs],
            [node for node in self._b if node not in self._taken],
        )

    def _free(self, left: ir.Node, right: ir.Node) -> bool:
        same = (left.domain, left.op_type) == (right.domain, right.op_type) != ("", "Constant")
        own = (left.graph, right.graph) == self._graphs  # not nodes of subgraphs that read the value
        return same and own and left not in self.pairs and right not in self._taken

    def _match(self, left: ir.Node, right: ir.Node) -> None:
        self.pairs[left] = right
        self._taken.add(right)
        self.values.update(zip(left.outputs, right.outputs, strict=False))


def match_nodes(
    a: ir.Graph,
    b: ir.Graph,
    inputs: Pairs,
    outputs: Pairs,
) -> NodeMatching:
    """Match two graphs, given pairs of inputs and outputs."""
    forward: dict[ir.Node, int] = {}
    backward: dict[ir.Node, int] = {}
    for side, graph in enumerate((a, b)):
        forward |= forward_hashes(graph, _seeds(inputs, side))
        backward |= backward_hashes(graph, _seeds(outputs, side))
    matching = NodeMatching(a, b, inputs)
    matching.equal(lambda node: (forward[node], backward[node]))
    matching.equal(weight_hash)
    matching.equal(forward.get)
    matching.equal(backward.get)
    matching.neighbours(outputs)
    return matching


def _seeds(pairs: Pairs, side: int) -> Seeds:
    return {pair[side]: number for number, pair in enumerate(pairs, start=2)}


def _near(a: ir.Node, b: ir.Node) -> list[tuple[ir.Node, ir.Node]]:
    """Pair the neighbours of two matched nodes."""
    operands = [(x, y) for x, y in zip(a.inputs, b.inputs, strict=False) if x is not None and y is not None]
    return [*_producers(operands), *_readers(list(zip(a.outputs, b.outputs, strict=False)))]


def _producers(pairs: Pairs) -> list[tuple[ir.Node, ir.Node]]:
    found = [(x.producer(), y.producer()) for x, y in pairs]
    return [(left, right) for left, right in found if left is not None and right is not None]


def _readers(pairs: Pairs) -> list[tuple[ir.Node, ir.Node]]:
    """Pair the consumers of two values by operator and operand index, if each side has exactly one."""
    readers: list[tuple[ir.Node, ir.Node]] = []
    for x, y in pairs:
        left, right = _by_kind(x), _by_kind(y)
        readers += [
            (nodes[0], right[kind][0])
            for kind, nodes in left.items()
            if len(nodes) == len(right.get(kind, [])) == 1
        ]
    return readers


def _by_kind(value: ir.Value) -> dict[tuple[str, str, int], list[ir.Node]]:
    kinds: dict[tuple[str, str, int], list[ir.Node]] = defaultdict(list)
    for use in value.uses():
        kinds[use.node.domain, use.node.op_type, use.idx].append(use.node)
    return kinds
