"""Compute logits only at requested positions, by a GatherND in front of the head.

With a vocabulary of 150,000, logits at every position take a third of the prefill time.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import LOGITS, LOGITS_POSITIONS
from ....errors import GraphError
from ...graph.edit import insert, shared_constant, weight
from ...passes.base import GraphPass

_HEAD = frozenset({"Add", "Cast", "Div", "Gemm", "Identity", "MatMul", "Mul", "Reshape", "Tanh"})


class SelectLogitsPass(GraphPass):
    """Compute ``logits`` at ``logits_positions`` [batch, wanted] only.

    Raises:
        GraphError: the graph has no output ``logits``.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Insert GatherND between the last norm and the head."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        if logits is None:
            raise GraphError("the graph has no output 'logits'; only decoder graphs can be lowered to slots")
        hidden, head = find_head(logits)
        if not head:
            raise GraphError(f"no head was found between the last norm and 'logits' ({logits.producer()})")
        wanted = ir.val(LOGITS_POSITIONS, ir.DataType.INT64, ["batch", "wanted"])
        graph.inputs.append(wanted)
        axis = shared_constant(graph, "slots.last_axis", np.array([-1], np.int64))
        index = insert(head[0], "Unsqueeze", [wanted, axis]).outputs[0]
        chosen = insert(head[0], "GatherND", [hidden, index], {"batch_dims": 1}).outputs[0]
        for position, operand in enumerate(head[0].inputs):
            if operand is hidden:
                head[0].replace_input_with(position, chosen)
        _reshape_after_gemm(graph, head, chosen)
        if logits.shape is not None:
            logits.shape = ir.Shape(["batch", "wanted", logits.shape[-1]])
        self.fired += 1


def find_head(logits: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the output of the last norm, and the nodes from it to the logits in order."""
    value, head = logits, list[ir.Node]()
    while (node := value.producer()) is not None and node.op_type in _HEAD and not node.domain:
        data = [operand for operand in node.inputs if operand is not None and weight(operand) is None]
        if not data or (node.op_type == "Add" and len(data) > 1):  # the residual sum is not part of the head
            break
        head.insert(0, node)
        value = data[0]
    return value, head


def _reshape_after_gemm(graph: ir.Graph, head: list[ir.Node], chosen: ir.Value) -> None:
    """Make the Reshape behind a tied head's Gemm read batch and length from the gathered rows."""
    kinds = [node.op_type for node in head]
    if "Gemm" not in kinds:
        return
    gemm = kinds.index("Gemm")
    if "Reshape" not in kinds[gemm:]:
        return
    reshape = head[kinds.index("Reshape", gemm)]
    rows = insert(reshape, "Shape", [chosen], {"start": 0, "end": 2}).outputs[0]
    rest = shared_constant(graph, "slots.minus_one", np.array([-1], np.int64))
    shape = insert(reshape, "Concat", [rows, rest], {"axis": 0}).outputs[0]
    reshape.replace_input_with(1, shape)
