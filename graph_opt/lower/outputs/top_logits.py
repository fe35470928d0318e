"""The best of the logits, found where they are: for targets whose memory lies behind a bus.

    logits   ->   logits, top_logits and top_token_ids [batch, wanted, count], logsumexp [batch, wanted]

These serve a request exactly if it is greedy, has a ``top_k`` up to ``count``, or a ``top_p`` whose mass the
best hold, which their log-sum-exp tells. On the CPU, NumPy finds them faster than TopK does.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import LOGITS, LOGSUMEXP, TOP_LOGITS, TOP_TOKEN_IDS
from ....errors import GraphError
from ...graph.edit import shared_constant, static_size
from ...passes.base import GraphPass


class TopLogitsPass(GraphPass):
    """Add the best ``count`` logits, their token ids and the log-sum-exp of all to the graph's outputs.

    Equal logits come in order of token id, as TopK promises and sampling wants.

    Raises:
        GraphError: the graph has no output ``logits`` of a known vocabulary.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def rewrite(self, graph: ir.Graph) -> None:
        """Append TopK, and a log-sum-exp written out: not all targets have a fast kernel for it."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        size = static_size(logits, -1)
        if logits is None or logits.shape is None or size is None:
            raise GraphError("the graph has no output 'logits' of a known vocabulary, so none are the best")
        rows = list(logits.shape)[:-1]
        count = min(self._count, size)
        axis = shared_constant(graph, "top_logits.axis", np.array([-1], np.int64))
        wanted = shared_constant(graph, "top_logits.count", np.array([count], np.int64))
        top = ir.node("TopK", [logits, wanted], {"axis": -1, "largest": 1, "sorted": 1}, num_outputs=2)
        nodes = [top]

        def append(op_type: str, *inputs: ir.Value) -> ir.Value:
            nodes.append(ir.node(op_type, inputs))
            return nodes[-1].outputs[0]

        largest = append("ReduceMax", logits, axis)
        mass = append("ReduceSum", append("Exp", append("Sub", logits, largest)), axis)
        total = append("Squeeze", append("Add", append("Log", mass), largest), axis)
        _describe(top.outputs[0], TOP_LOGITS, logits.dtype, [*rows, count])
        _describe(top.outputs[1], TOP_TOKEN_IDS, ir.DataType.INT64, [*rows, count])
        _describe(total, LOGSUMEXP, logits.dtype, rows)
        graph.extend(nodes)
        graph.outputs.extend([*top.outputs, total])
        self.fired += 1


def _describe(
    value: ir.Value, name: str, dtype: ir.DataType | None, shape: list[int | ir.SymbolicDim]
) -> None:
    value.name, value.shape = name, ir.Shape(shape)
    if dtype is not None:
        value.type = ir.TensorType(dtype)
