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
_PRODUCTS = ("MatMul", "Gemm")


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
        readers = {head[0], *(sums for node in head if (sums := _block_sums(node)) is not None)}
        first = next(node for node in graph if node in readers)
        index = insert(first, "Unsqueeze", [wanted, axis]).outputs[0]
        chosen = insert(first, "GatherND", [hidden, index], {"batch_dims": 1}).outputs[0]
        for reader in readers:
            for position, operand in enumerate(reader.inputs):
                if operand is hidden:
                    reader.replace_input_with(position, chosen)
        _reshape_after_gemm(graph, head, chosen)
        if logits.shape is not None:
            logits.shape = ir.Shape(["batch", "wanted", logits.shape[-1]])
        self.fired += 1


def find_head(logits: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the output of the last norm, and the nodes from it to the logits in order."""
    value, head = logits, list[ir.Node]()
    while (node := value.producer()) is not None and node.op_type in _HEAD and not node.domain:
        data = [operand for operand in node.inputs if operand is not None and weight(operand) is None]
        if not data:
            break
        if node.op_type == "Add" and len(data) > 1 and _block_sums(node) is None:
            break  # the residual sum is not part of the head
        head.insert(0, node)
        value = data[0]
    return value, head


def _block_sums(node: ir.Node) -> ir.Node | None:
    """Return the Reshape that begins the second product of a weight with block minima, whose sum is ``node``.

    ``SplitMinimaPass`` writes ``Add(MatMul(x, W), MatMul(ReduceSum(Reshape(x)), minima))``.
    """
    products = [value.producer() if value is not None else None for value in node.inputs]
    if node.op_type != "Add" or any(one is None or one.op_type not in _PRODUCTS for one in products):
        return None
    whole, minima = (one.inputs[0] for one in products if one is not None)
    sums = minima.producer() if minima is not None else None
    apart = sums.inputs[0].producer() if sums is not None and sums.inputs[0] is not None else None
    return apart if apart is not None and apart.op_type == "Reshape" and apart.inputs[0] is whole else None


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
