"""Replace positions computed inside of a graph by the input ``position_ids``.

Some traces compute the positions past, past + 1, ... themselves, equal for all rows. Left-padded rows need
other positions, so angles and position tables must read them from the input.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS, POSITION_IDS
from ...analysis.shape_facts import ShapeFacts
from ...graph.edit import insert, shared_constant
from ..base import GraphPass


class PositionIdsPass(GraphPass):
    """Add the input ``position_ids`` to a graph that computes its positions."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Make angles and position tables read the input."""
        names = {value.name for value in graph.inputs}
        if POSITION_IDS in names or INPUT_IDS not in names:
            return
        facts = ShapeFacts(graph, far=False)  # the content of long sequences is not computed
        readers = [(node, found) for node in graph if (found := _counted(facts, node)) is not None]
        if not readers:
            return
        positions = ir.val(POSITION_IDS, ir.DataType.INT64, ["batch", "sequence"])
        graph.inputs.append(positions)
        for node, (rank, axis) in readers:
            node.replace_input_with(_operand_index(node), _shaped(graph, node, positions, rank, axis))
            self.fired += 1


def _operand_index(node: ir.Node) -> int:
    return 1 if node.op_type == "Gather" else 0


def _counted(facts: ShapeFacts, node: ir.Node) -> tuple[int, int] | None:
    """Return the rank and token axis of the positions that a node casts to angles or looks up, else None."""
    if node.domain or node.op_type not in ("Cast", "Gather"):
        return None
    if node.op_type == "Cast" and node.attributes["to"].as_int() != ir.DataType.FLOAT:
        return None
    contents = facts.contents(node.inputs[_operand_index(node)])
    if contents is None or any(
        not np.array_equal(content.reshape(-1), np.arange(probe.past, probe.total))
        for content, probe in zip(contents, facts.probes, strict=True)
    ):
        return None
    rank = contents[0].ndim
    axes = [
        axis for axis in range(1, rank) if all(content.size == content.shape[axis] for content in contents)
    ]
    return (rank, axes[-1]) if axes else None


def _shaped(graph: ir.Graph, before: ir.Node, positions: ir.Value, rank: int, axis: int) -> ir.Value:
    """Return positions of ``rank`` axes, with the batch on axis 0 and the tokens on ``axis``."""
    if rank == 2:
        return positions
    others = np.array([other for other in range(1, rank) if other != axis], np.int64)
    axes = shared_constant(graph, f"positions.axes_{rank}_{axis}", others)
    return insert(before, "Unsqueeze", [positions, axes]).outputs[0]
