"""Replace positions computed inside of a graph by the input ``position_ids``.

Some traces compute the positions past, past + 1, ... themselves, equal for all rows, or add a constant to
look them up in a table. Left-padded rows need other positions, so angles and position tables must read them
from the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS, POSITION_IDS
from ....records import dataclass
from ...analysis.shape_facts import ShapeFacts
from ...graph.edit import insert, int_attribute, remove_unused, replace, shared_constant, sole_consumer
from ...graph.lazy import Array
from ..base import GraphPass


class PositionIdsPass(GraphPass):
    """Add the input ``position_ids`` to a graph that computes its positions."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Make angles and position tables read the input."""
        names = {value.name for value in graph.inputs}
        if POSITION_IDS in names or INPUT_IDS not in names:
            return
        facts = ShapeFacts(graph, far=False)  # the content of long sequences is not computed
        readers = [(node, counted) for node in graph if (counted := _counted(facts, node)) is not None]
        if not readers:
            return
        positions = ir.val(POSITION_IDS, ir.DataType.INT64, ["batch", "sequence"])
        graph.inputs.append(positions)
        for node, counted in readers:
            node.replace_input_with(_operand_index(node), _shaped(graph, node, positions, counted))
            if counted.rank == 1:
                _drop_reshape(graph, node)
            self.fired += 1
        _widen(graph, [value for node, _ in readers for value in node.outputs])


@dataclass(frozen=True, slots=True)
class _Counted:
    """Positions: their rank, the axis of the tokens, and what is added to them.

    Those of rank 1 are looked up, and a Reshape behind that makes [1, tokens, width] of the rows.
    """

    rank: int
    axis: int
    offset: int


def _operand_index(node: ir.Node) -> int:
    return 1 if node.op_type == "Gather" else 0


def _counted(facts: ShapeFacts, node: ir.Node) -> _Counted | None:
    """Return the positions that a node casts to angles or looks up, else None."""
    if node.domain or node.op_type not in ("Cast", "Gather"):
        return None
    if node.op_type == "Cast" and node.attributes["to"].as_int() != ir.DataType.FLOAT:
        return None
    contents = facts.contents(node.inputs[_operand_index(node)])
    if contents is None or not all(content.size for content in contents):
        return None
    offsets = {
        tuple(np.unique(content.reshape(-1) - np.arange(probe.past, probe.total)))
        if content.size == probe.total - probe.past
        else ()
        for content, probe in zip(contents, facts.probes, strict=True)
    }
    offset = offsets.pop()
    if offsets or len(offset) != 1 or (offset[0] and node.op_type != "Gather"):
        return None
    rank = contents[0].ndim
    if rank == 1:
        return _Counted(1, 0, int(offset[0])) if _is_reshaped_rows(facts, node, contents) else None
    axes = [
        axis for axis in range(1, rank) if all(content.size == content.shape[axis] for content in contents)
    ]
    return _Counted(rank, axes[-1], int(offset[0])) if axes else None


def _is_reshaped_rows(facts: ShapeFacts, node: ir.Node, contents: Sequence[Array]) -> bool:
    """Return whether the only reader of a Gather makes [1, tokens, width] of its rows [tokens, width]."""
    reader = sole_consumer(node.outputs[0]) if node.op_type == "Gather" else None
    if reader is None or reader.op_type != "Reshape" or reader.domain or int_attribute(node, "axis", 0):
        return False
    rows, reshaped = facts.shapes(node.outputs[0]), facts.shapes(reader.outputs[0])
    if rows is None or reshaped is None or len(rows[0]) != 2:
        return False
    return all(
        shape == (1, *row) and row[0] == content.size
        for row, shape, content in zip(rows, reshaped, contents, strict=True)
    )


def _shaped(graph: ir.Graph, before: ir.Node, positions: ir.Value, counted: _Counted) -> ir.Value:
    """Return positions plus the offset, with the batch on axis 0 and the tokens on the wanted axis."""
    value = positions
    if counted.offset:
        added = shared_constant(
            graph, f"positions.offset_{counted.offset}", np.array(counted.offset, np.int64)
        )
        value = insert(before, "Add", [value, added]).outputs[0]
        value.shape, value.dtype = positions.shape, ir.DataType.INT64
    if counted.rank <= 2:
        return value
    others = np.array([other for other in range(1, counted.rank) if other != counted.axis], np.int64)
    axes = shared_constant(graph, f"positions.axes_{counted.rank}_{counted.axis}", others)
    return insert(before, "Unsqueeze", [value, axes]).outputs[0]


def _widen(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Let values of one row, and what is computed of them alone, have the rows of the batch.

    A Reshape that states the one row as its first axis copies that axis instead.
    """
    reached, waiting = set[ir.Value](), list(values)
    while waiting:
        value = waiting.pop()
        reached.add(value)
        if value.shape is not None and len(value.shape) > 1 and value.shape[0] == 1:
            value.shape = ir.Shape(["batch", *value.shape[1:]])
        for use in value.uses():
            node = use.node
            known = all(x is None or x.const_value is not None or x in reached for x in node.inputs)
            if not known or node.domain or not _keeps_rows(node):
                continue
            if node.op_type == "Reshape":
                _copy_rows(graph, node)
            waiting += [output for output in node.outputs if output not in reached]


def _keeps_rows(node: ir.Node) -> bool:
    """Return whether the first axis of a node's input stays the first one."""
    if node.op_type != "Transpose":
        return node.op_type != "Shape"
    return "perm" in node.attributes and node.attributes["perm"].as_ints()[0] == 0


def _copy_rows(graph: ir.Graph, reshape: ir.Node) -> None:
    shape = reshape.inputs[1]
    sizes = shape.const_value.numpy() if shape is not None and shape.const_value is not None else None
    if sizes is None or not sizes.size or sizes[0] != 1 or int_attribute(reshape, "allowzero", 0):
        return
    copied = np.array([0, *sizes[1:]], np.int64)
    name = f"positions.shape_{'_'.join(map(str, copied.tolist()))}"
    reshape.replace_input_with(1, shared_constant(graph, name, copied))


def _drop_reshape(graph: ir.Graph, gather: ir.Node) -> None:
    """Let the rows [batch, tokens, width] of a Gather take the place of [1, tokens, width]."""
    rows = gather.outputs[0]
    reshape = sole_consumer(rows)
    if reshape is None:
        raise AssertionError("unreachable: _is_reshaped_rows has found the Reshape")
    rows.shape = None
    old = reshape.outputs[0]
    old.shape = None
    replace(old, rows)
    remove_unused(graph, reshape)
