"""Fold operators on small constants into constants; weights are not folded."""

from __future__ import annotations

import onnx_ir as ir

from ...analysis.constant_evaluation import content_of
from ...graph.edit import add_initializer, remove_unused, replace, weight
from ...graph.lazy import bits_of, shape_of
from ..base import GraphPass

_BUDGET = 1 << 16  # elements of an operand or of the result
_MIN_BITS = 8  # narrower types are weights; strings count as 0 bits


class FoldConstantsPass(GraphPass):
    """Fold nodes of standard operators whose operands are all small constants.

    Args:
        budget: maximum number of elements of an operand and of a result.
        growth: maximum number of bytes by which a result may exceed its operands; None for no limit.
    """

    def __init__(self, budget: int = _BUDGET, growth: int | None = None) -> None:
        super().__init__()
        self.budget, self.growth = budget, growth

    def rewrite(self, graph: ir.Graph) -> None:
        """Fold nodes in topological order, so that chains are folded completely."""
        for node in list(graph):
            if node.domain or not node.inputs or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
                continue
            tensors = [None if value is None else weight(value) for value in node.inputs]
            constants = [(value, tensor) for value, tensor in zip(node.inputs, tensors, strict=True) if value]
            if any(tensor is None or not self._is_small(tensor) for _, tensor in constants):
                continue
            operands = [None if tensor is None else tensor.numpy() for tensor in tensors]
            shapes = [() if tensor is None else shape_of(tensor) for tensor in tensors]
            content = content_of(node, operands, shapes, self.budget)
            given_bytes = sum(tensor.nbytes for _, tensor in constants if tensor is not None)
            if content is None or (self.growth is not None and content.nbytes > given_bytes + self.growth):
                continue
            folded = add_initializer(graph, f"{node.outputs[0].name}.folded", content)
            replace(node.outputs[0], folded)
            remove_unused(graph, node)
            self.fired += 1

    def _is_small(self, tensor: ir.TensorProtocol) -> bool:
        return tensor.size <= self.budget and bits_of(tensor.dtype) >= _MIN_BITS
