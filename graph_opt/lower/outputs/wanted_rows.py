"""Compute only the rows with requested logits after the last attention, by moving the Gather upstream.

A prompt usually needs one row, which saves three quarters of the last layer's work.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import LOGITS_POSITIONS
from ...graph.edit import insert, int_attribute, nodes_of, remove_unused, replace, weight
from ...passes.base import GraphPass

_ROWWISE = frozenset({"Add", "Cast", "Div", "Gelu", "MatMul", "Mul", "Relu", "Sigmoid", "Sub", "Tanh"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_RANK = 3  # [tokens, 1, features]


class WantedRowsPass(GraphPass):
    """Move the Gather of requested rows of a flat batch upstream past all row-wise nodes."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every Gather by ``logits_positions``."""
        for gather in list(nodes_of(graph, "Gather")):
            wanted = gather.inputs[1]
            if wanted is None or wanted.name != LOGITS_POSITIONS or int_attribute(gather, "axis", 0):
                continue
            region = _rowwise_region(graph, gather)
            if not any(node.op_type == "MatMul" for node in region):
                self.refuse(gather, "no MatMul in front of it is row-wise and read by it only")
                continue
            _move(graph, gather, region)
            self.fired += 1


def _rowwise_region(graph: ir.Graph, gather: ir.Node) -> list[ir.Node]:
    """Return, in order, the row-wise nodes whose results are read by each other and ``gather`` only."""
    region = {gather}
    for node in reversed(graph):  # consumers before producers
        readers = {use.node for output in node.outputs for use in output.uses()}
        kept = any(output.is_graph_output() for output in node.outputs)
        if readers and readers <= region and not kept and _is_rowwise(node):
            region.add(node)
    return [node for node in graph if node in region and node is not gather]


def _is_rowwise(node: ir.Node) -> bool:
    """Return whether each row of the result depends only on the same row of the operands."""
    rows = _row_operands(node)
    if node.domain or not rows or any(value.shape is None or len(value.shape) != _RANK for value in rows):
        return False
    if node.op_type in _NORMS:
        return int_attribute(node, "axis", -1) in (-1, _RANK - 1) and len(rows) == 1
    if node.op_type == "MatMul":
        return rows == [node.inputs[0]]
    rest = [value for value in node.inputs if value is not None and value not in rows]
    return node.op_type in _ROWWISE and all(_is_one_row(value) for value in rest)


def _is_one_row(value: ir.Value) -> bool:
    """Return whether a constant is the same for all rows."""
    shape = value.shape
    return shape is not None and (len(shape) < _RANK or (len(shape) == _RANK and shape[0] == 1))


def _row_operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and not _is_stored(value)]


def _is_stored(value: ir.Value) -> bool:
    """Return whether a value is a weight or a dequantized weight."""
    producer = value.producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return weight(value) is not None
    return all(operand is None or weight(operand) is not None for operand in producer.inputs)


def _move(graph: ir.Graph, gather: ir.Node, region: list[ir.Node]) -> None:
    """Gather the inputs of the region instead of its output."""
    chosen: dict[ir.Value, ir.Value] = {}
    made = {output for node in region for output in node.outputs}
    for node in region:
        for index, value in enumerate(node.inputs):
            if value is None or value in made or _is_stored(value):
                continue
            if value not in chosen:
                chosen[value] = insert(node, "Gather", [value, gather.inputs[1]], {"axis": 0}).outputs[0]
            node.replace_input_with(index, chosen[value])
        for output in node.outputs:
            if output.shape is not None:
                output.shape = ir.Shape(["wanted", *output.shape[1:]])
    replace(gather.outputs[0], region[-1].outputs[0])
    remove_unused(graph, gather)
