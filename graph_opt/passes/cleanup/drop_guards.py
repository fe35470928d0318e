"""Where(row sees nothing, 0, x) -> x: every real token sees itself.

Exporters put such guards behind an attention, where a row of padding that sees nothing would be no number.
Canonical masks are finite, so there is nothing to guard against. What the condition means is evaluated.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import ATTENTION_MASK
from ....errors import GraphError
from ...analysis.decoder_inputs import is_decoder
from ...analysis.probe import never_holds
from ...graph.edit import certainly_equal, constant, insert, nodes_of, remove_unused, replace, weight
from ..base import GraphPass

_MOST_NODES = 64  # of a condition
_SMALL = 64  # elements of its constants


class DropGuardsPass(GraphPass):
    """Remove what replaces rows that see nothing by zeros."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Evaluate each condition once."""
        if not is_decoder(graph):
            return
        known: dict[tuple[ir.Value, bool], bool] = {}
        for node in nodes_of(graph, "Where"):
            condition, left, right = node.inputs
            zero_first = _is_zero(left)
            kept = right if zero_first else left
            if condition is None or kept is None or not (zero_first or _is_zero(right)):
                continue
            if not certainly_equal(kept.shape, node.outputs[0].shape) or not _is_of_masks(condition):
                continue
            key = (condition, zero_first)
            if key not in known:
                known[key] = self._never_zero(graph, node, condition, zero_first)
            if known[key]:
                replace(node.outputs[0], kept)
                remove_unused(graph, node)
                self.fired += 1

    def _never_zero(self, graph: ir.Graph, node: ir.Node, condition: ir.Value, zero_first: bool) -> bool:
        """Return whether the zero is chosen for padding at most."""
        tested = condition if zero_first else insert(node, "Not", [condition]).outputs[0]
        try:
            return never_holds(graph, tested)
        except GraphError as error:
            self.refuse(node, str(error))
            return False
        finally:
            if tested is not condition:
                remove_unused(graph, tested.producer())


def _is_zero(value: ir.Value | None) -> bool:
    tensor = value.const_value if value is not None else None
    if tensor is None or tensor.size != 1:
        return False
    content = constant(value)
    return content is not None and not content.any()


def _is_of_masks(condition: ir.Value) -> bool:
    """Whether a value comes of shapes, ``attention_mask`` and small constants alone, by few nodes."""
    seen: set[ir.Node] = set()
    waiting = [condition]
    while waiting:
        value = waiting.pop()
        node, tensor = value.producer(), weight(value)
        if tensor is not None and tensor.size > _SMALL:
            return False
        if value.is_graph_input() and value.name != ATTENTION_MASK:
            return False
        if node is not None and node not in seen:
            seen.add(node)
            of_shapes = node.op_type == "Shape" and not node.domain
            waiting += [] if of_shapes else [operand for operand in node.inputs if operand is not None]
        if len(seen) > _MOST_NODES:
            return False
    return True
