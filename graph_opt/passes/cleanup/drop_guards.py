"""Remove guards against fully masked rows: Where(row sees nothing, 0, x) -> x.

Exporters add them after an attention, because a fully masked row of padding gives NaN with infinite masks.
Canonical masks are finite, and every real token sees itself. The meaning of the condition is found by
evaluation.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import ATTENTION_MASK
from ....errors import GraphError
from ...analysis.decoder_inputs import is_decoder
from ...analysis.probe import never_holds
from ...graph.edit import certainly_equal, constant, insert, nodes_of, remove_unused, replace, weight
from ..base import GraphPass

_MAX_NODES = 64  # nodes of a condition
_SMALL = 64  # elements of a constant of a condition


class DropGuardsPass(GraphPass):
    """Remove Where nodes that replace fully masked rows by zeros."""

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
        """Return whether the zero is selected for padding only."""
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
    """Return whether a value depends only on shapes, ``attention_mask`` and small constants, by few nodes."""
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
        if len(seen) > _MAX_NODES:
            return False
    return True
