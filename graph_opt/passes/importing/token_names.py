"""Rename token ids and logits to the contract's names."""

from __future__ import annotations

import onnx_ir as ir

from ....contract import INPUT_IDS, LOGITS, POSITION_IDS
from ...analysis.decoder_inputs import find_input
from ...graph.edit import int_attribute, nodes_of, static_size, take_name, weight
from ...graph.lazy import shape_of
from ..base import GraphPass


class TokenNamesPass(GraphPass):
    """Rename the input that is looked up in the only embedding, and the output with its vocabulary size."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rename both, or neither."""
        found = {(ids, rows) for node in nodes_of(graph, "Gather") for ids, rows in _embedded(node)}
        if len(found) != 1:
            return
        ids, rows = found.pop()
        scores = [
            value for value in graph.outputs if _is_of_rank(value, 3) and static_size(value, -1) == rows
        ]
        named = [value for value in scores if value.name == LOGITS] or scores
        other = find_input(graph, INPUT_IDS)
        if len(named) != 1 or (other is not None and other is not ids):
            return
        for value, name in ((ids, INPUT_IDS), (named[0], LOGITS)):
            self.fired += value.name != name
            take_name(graph, value, name)


def _embedded(node: ir.Node) -> list[tuple[ir.Value, int]]:
    """Return the graph input that a Gather looks up in a 2-D weight, and the weight's number of rows."""
    table, ids = weight(node.inputs[0]), node.inputs[1]
    if table is None or ids is None or not ids.is_graph_input() or int_attribute(node, "axis", 0):
        return []
    rows = shape_of(table)[0] if len(table.shape) == 2 else 0
    return [(ids, rows)] if rows and _is_of_rank(ids, 2) and ids.name != POSITION_IDS else []


def _is_of_rank(value: ir.Value, rank: int) -> bool:
    return value.shape is not None and len(value.shape) == rank
