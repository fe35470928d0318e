"""Positions counted inside a graph -> the input ``position_ids``, so that every row may have its own.

Some traces number their tokens past, past + 1, ... themselves, alike for all rows. Where such numbers become
angles or rows of a table, they are read from the input instead, so that padded rows can be numbered rightly.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..edit import insert, shared_constant
from .base import GraphPass
from .shape_facts import ShapeFacts

_NAME = "position_ids"


class PositionIdsPass(GraphPass):
    """Add the input ``position_ids`` to a graph that counts its positions."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Let angles and position tables read the input."""
        names = {value.name for value in graph.inputs}
        if _NAME in names or "input_ids" not in names:
            return
        facts = ShapeFacts(graph)
        readers = [node for node in graph if _reads_positions(facts, node)]
        if not readers:
            return
        positions = ir.val(_NAME, ir.DataType.INT64, ["batch", "sequence"])
        graph.inputs.append(positions)
        for node in readers:
            index = _operand_index(node)
            operand = node.inputs[index]
            rank = len(operand.shape) if operand is not None and operand.shape is not None else 2
            node.replace_input_with(index, _with_rank(graph, node, positions, rank))
            self.fired += 1


def _operand_index(node: ir.Node) -> int:
    return 1 if node.op_type == "Gather" else 0


def _reads_positions(facts: ShapeFacts, node: ir.Node) -> bool:
    """Whether a node turns counted positions [1, ..., sequence] into angles or looks them up in a table."""
    if node.domain or node.op_type not in ("Cast", "Gather"):
        return False
    if node.op_type == "Cast" and node.attributes["to"].as_int() != ir.DataType.FLOAT:
        return False
    value = node.inputs[_operand_index(node)]
    contents = facts.contents(value)
    if contents is None or contents[0].ndim < 2:
        return False
    return all(
        content.size == content.shape[-1]
        and np.array_equal(content.reshape(-1), np.arange(probe.past, probe.total))
        for content, probe in zip(contents, facts.probes, strict=True)
    )


def _with_rank(graph: ir.Graph, before: ir.Node, positions: ir.Value, rank: int) -> ir.Value:
    """Return positions as [batch, 1, ..., sequence]."""
    if rank == 2:
        return positions
    name = f"positions.axes_{rank}"
    axes = shared_constant(graph, name, np.arange(1, rank - 1, dtype=np.int64))
    return insert(before, "Unsqueeze", [positions, axes]).outputs[0]
