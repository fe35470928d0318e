"""Leave out the mask of attention in towers of pictures where every group is as long as the longest.

``groups`` of ``vision.onnx`` says which patches attend to each other, -1 where a group is shorter. Units of
one shape have full groups, and onnxruntime's MultiHeadAttention computes them in tiles only without a mask.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import GROUPS
from ...graph.edit import insert, nodes_of, replace
from ...passes.base import GraphPass

_MASK = 3


class FullGroupsPass(GraphPass):
    """Rewrite attention whose mask depends on ``groups`` alone; the caller must then give full groups."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Remove the masks."""
        for node in nodes_of(graph, "Attention"):
            mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
            if mask is None or any(value is not None for value in node.inputs[_MASK + 1 :]):
                continue
            if _sources(mask) != {GROUPS}:
                self.refuse(node, f"its mask does not depend on '{GROUPS}' alone")
                continue
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            made = insert(node, "Attention", list(node.inputs[:_MASK]), attributes)
            made.name = node.name
            made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
            replace(node.outputs[0], made.outputs[0])
            graph.remove(node, safe=True)
            self.fired += 1


def _sources(value: ir.Value) -> set[str]:
    """Return the names of the graph's inputs that a value is computed from."""
    found, left, seen = set[str](), [value], set[ir.Value]()
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        node = each.producer()
        if node is not None:
            left += [operand for operand in node.inputs if operand is not None]
        elif each.is_graph_input():
            found.add(each.name or "")
    return found
