"""Lower weights with a float minimum for every block, as stored in GGUF's Q4_1 and Q4_K.

``W = Reshape(Add(Reshape(DequantizeLinear(values, scales)), minima))``. The inner shape has the
blocks and their elements as two axes. A kernel for blocked weights computes x @ W in two products:
``x @ dequantized + sums(x) @ minima``, where ``sums(x)`` adds up the inputs of each block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import (
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    weight,
)
from ...graph.lazy import reshape, shape_of
from ...passes.base import GraphPass
from .blocked_weight import BlockedWeight, blocked_weight


@dataclass(frozen=True, slots=True)
class WeightWithMinima:
    """A blocked weight and what is added to each block.

    Args:
        blocked: the weight without its minima.
        minima: [blocks, 1, outputs], or [outputs, blocks, 1] if the blocks are along axis 1.
    """

    blocked: BlockedWeight
    minima: ir.Value

    @property
    def dequantized(self) -> ir.Value:
        """The weight without its minima."""
        return self.blocked.node.outputs[0]


def weight_with_minima(value: ir.Value | None) -> WeightWithMinima | None:
    """Return the weight with minima that ``value`` is, or None for other values."""
    outer = _producer(value, "Reshape")
    added = _producer(outer.inputs[0], "Add") if outer is not None else None
    inner = _producer(added.inputs[0], "Reshape") if added is not None else None
    minima = added.inputs[1] if added is not None else None
    tensor = weight(minima)
    if inner is None or minima is None or tensor is None or len(tensor.shape) != 3:
        return None
    blocked = blocked_weight(inner.inputs[0])
    if not isinstance(blocked, BlockedWeight) or shape_of(tensor) != _minima_shape(blocked):
        return None
    return WeightWithMinima(blocked, minima)


def write_weight_with_minima(
    graph: ir.Graph, anchor: ir.Node, dequantized: ir.Value, minima: ir.Value, axis: int, block_size: int
) -> ir.Value:
    """Insert the nodes that add ``minima`` to ``dequantized`` [inputs, outputs], or its transpose."""
    tensor = weight(minima)
    if tensor is None:
        raise TypeError("minima are an initializer")
    apart = list(shape_of(tensor))
    apart[axis + 1] = block_size
    whole = [*apart[:axis], apart[axis] * block_size, *apart[axis + 2 :]]
    blocks = insert(anchor, "Reshape", [dequantized, _ints(graph, apart)]).outputs[0]
    added = insert(anchor, "Add", [blocks, minima]).outputs[0]
    return insert(anchor, "Reshape", [added, _ints(graph, whole)]).outputs[0]


class SplitMinimaPass(GraphPass):
    """Compute products with the minima of blocks separately, and add minima to gathered rows."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite MatMul, Gemm with a transposed weight, and Gather."""
        self._sums: dict[tuple[ir.Value, int], ir.Value] = {}
        self._minima: dict[ir.Value, ir.Value] = {}
        for op_type, position, axis in (("MatMul", 1, 0), ("Gemm", 1, 1), ("Gather", 0, 1)):
            for node in nodes_of(graph, op_type):
                blocked = weight_with_minima(node.inputs[position])
                if blocked is None:
                    continue
                data = node.inputs[1] if op_type == "Gather" else node.inputs[0]
                reason = _misfit(node, blocked, axis, data)
                if reason is not None or data is None or data.shape is None:
                    self.refuse(node, reason or "the rank of its input is not known")
                elif op_type == "Gather":
                    self._split_gather(graph, node, blocked, len(data.shape))
                else:
                    self._split_product(graph, node, blocked, data, len(data.shape))

    def _split_product(
        self, graph: ir.Graph, node: ir.Node, blocked: WeightWithMinima, x: ir.Value, rank: int
    ) -> None:
        size = blocked.blocked.block_size
        if (x, size) not in self._sums:
            shape = _ints(graph, [*[0] * (rank - 1), blocked.blocked.blocks, size])
            last = shared_constant(graph, "minima.last_axis", np.array([-1], np.int64))
            apart = insert(node, "Reshape", [x, shape]).outputs[0]
            self._sums[x, size] = insert(node, "ReduceSum", [apart, last], {"keepdims": 0}).outputs[0]
        attributes = {"transB": 1} if node.op_type == "Gemm" else {}
        product = insert(node, node.op_type, [x, blocked.dequantized], attributes)
        product.name = node.name
        operands = [self._sums[x, size], self._matrix(graph, blocked)]
        offsets = insert(node, node.op_type, operands, attributes).outputs[0]
        self._finish(graph, node, insert(node, "Add", [product.outputs[0], offsets]).outputs[0])

    def _split_gather(self, graph: ir.Graph, node: ir.Node, found: WeightWithMinima, rank: int) -> None:
        ids, blocked = node.inputs[1], found.blocked
        rows = insert(node, "Gather", [found.dequantized, ids], {"axis": 0}).outputs[0]
        offsets = insert(node, "Gather", [self._matrix(graph, found), ids], {"axis": 0}).outputs[0]
        last = shared_constant(graph, "minima.last_axis", np.array([-1], np.int64))
        offsets = insert(node, "Unsqueeze", [offsets, last]).outputs[0]
        shape = _ints(graph, [*[0] * rank, blocked.blocks, blocked.block_size])
        apart = insert(node, "Reshape", [rows, shape]).outputs[0]
        added = insert(node, "Add", [apart, offsets]).outputs[0]
        whole = _ints(graph, [*[0] * rank, blocked.inputs])
        self._finish(graph, node, insert(node, "Reshape", [added, whole]).outputs[0])

    def _finish(self, graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
        replace(node.outputs[0], result)
        remove_unused(graph, node)
        self.fired += 1

    def _matrix(self, graph: ir.Graph, blocked: WeightWithMinima) -> ir.Value:
        """Add the minima as an initializer: [blocks, outputs] or [outputs, blocks]."""
        if blocked.minima not in self._minima:
            tensor = weight(blocked.minima)
            if tensor is None:
                raise TypeError("minima are an initializer")
            shape = [size for i, size in enumerate(shape_of(tensor)) if i != blocked.blocked.axis + 1]
            name = f"{blocked.minima.name}.matrix"
            self._minima[blocked.minima] = add_initializer(graph, name, reshape(tensor, shape))
        return self._minima[blocked.minima]


def _misfit(node: ir.Node, found: WeightWithMinima, axis: int, data: ir.Value | None) -> str | None:
    if found.blocked.axis != axis:
        return "the weight is blocked along its other axis"
    if found.blocked.inputs % found.blocked.block_size:
        return "the last block is short"
    if node.op_type == "Gather" and int_attribute(node, "axis", 0):
        return "it gathers along blocks"
    if node.op_type == "Gemm":
        plain = int_attribute(node, "transB", 0) and not int_attribute(node, "transA", 0)
        if not plain or len(node.inputs) > 2 or float_attribute(node, "alpha", 1.0) != 1.0:
            return "the Gemm does more than a product with a transposed weight"
    return None


def _minima_shape(blocked: BlockedWeight) -> tuple[int, ...]:
    shape = (blocked.blocks, blocked.outputs) if blocked.axis == 0 else (blocked.outputs, blocked.blocks)
    return (*shape[: blocked.axis + 1], 1, *shape[blocked.axis + 1 :])


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _ints(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    name = "_".join(map(str, numbers)).replace("-", "minus")
    return shared_constant(graph, f"minima.shape_{name}", np.array(numbers, np.int64))
