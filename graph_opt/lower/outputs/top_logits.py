"""Select the top logits on the device, for targets with their own memory.

    logits   ->   logits, top_logits and top_token_ids [batch, wanted, count], logsumexp [batch, wanted]

They are exact for a request that is greedy, has ``top_k`` <= ``count``, or has a ``top_p`` whose probability
mass the top logits cover, which the log-sum-exp shows. On the CPU, NumPy is faster than TopK. Targets with
carryall's ``DrawTokens`` compute them in one kernel.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import LOGITS, LOGSUMEXP, TOP_LOGITS, TOP_TOKEN_IDS
from ....errors import GraphError
from ...graph.edit import OWN, shared_constant, static_size
from ...passes.base import GraphPass


class TopLogitsPass(GraphPass):
    """Add the top ``count`` logits, their token ids and the log-sum-exp of all logits to the outputs.

    Equal logits are ordered by token id, as TopK specifies and sampling needs.

    Args:
        count: the number of top logits.
        most_fused: the most that the target's ``DrawTokens`` computes; 0 if it has none.

    Raises:
        GraphError: the graph has no output ``logits`` with a known vocabulary size.
    """

    def __init__(self, count: int, most_fused: int = 0) -> None:
        super().__init__()
        self._count, self._most_fused = count, most_fused

    def rewrite(self, graph: ir.Graph) -> None:
        """Append ``DrawTokens``, or TopK and the log-sum-exp in basic operators, which all targets have."""
        logits = next((value for value in graph.outputs if value.name == LOGITS), None)
        size = static_size(logits, -1)
        if logits is None or logits.shape is None or size is None:
            raise GraphError("the graph has no output 'logits' with a known vocabulary size")
        rows = list(logits.shape)[:-1]
        count = min(self._count, size)
        if count <= self._most_fused and logits.dtype == ir.DataType.FLOAT:
            results = _fused(graph, logits, count)
        else:
            results = self._written(graph, logits, count)
        _describe(results[0], TOP_LOGITS, logits.dtype, [*rows, count])
        _describe(results[1], TOP_TOKEN_IDS, ir.DataType.INT64, [*rows, count])
        _describe(results[2], LOGSUMEXP, logits.dtype, rows)
        graph.outputs.extend(results)
        self.fired += 1

    def _written(self, graph: ir.Graph, logits: ir.Value, count: int) -> list[ir.Value]:
        axis = shared_constant(graph, "top_logits.axis", np.array([-1], np.int64))
        wanted = shared_constant(graph, "top_logits.count", np.array([count], np.int64))
        top = ir.node("TopK", [logits, wanted], {"axis": -1, "largest": 1, "sorted": 1}, num_outputs=2)
        nodes = [top]

        def append(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes))
            return nodes[-1].outputs[0]

        # CUDA's ReduceMax would need cuDNN, its ReduceSum of the last axis does not.
        first = shared_constant(graph, "top_logits.first", np.array([0], np.int64))
        largest = append("Gather", top.outputs[0], first, axis=-1)
        mass = append("ReduceSum", append("Exp", append("Sub", logits, largest)), axis)
        total = append("Squeeze", append("Add", append("Log", mass), largest), axis)
        graph.extend(nodes)
        return [*top.outputs, total]


def _fused(graph: ir.Graph, logits: ir.Value, count: int) -> list[ir.Value]:
    node = ir.node("DrawTokens", [logits], {"count": count}, domain=OWN, num_outputs=3)
    graph.append(node)
    graph.opset_imports.setdefault(OWN, 1)
    return list(node.outputs)


def _describe(
    value: ir.Value, name: str, dtype: ir.DataType | None, shape: list[int | ir.SymbolicDim]
) -> None:
    value.name, value.shape = name, ir.Shape(shape)
    if dtype is not None:
        value.type = ir.TensorType(dtype)
