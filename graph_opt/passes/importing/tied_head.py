"""Share one tensor between an embedding and its tied head: Gather(W, ids) and Gemm(x, W, transB=1).

Other exporters store a transposed copy, or transpose one of the two at every run.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS, LOGITS
from ...graph.edit import add_initializer, insert, nodes_of, remove_unused, replace, shared_constant, weight
from ...graph.lazy import shape_of, transpose
from ..base import GraphPass

_SAMPLE = 4  # rows compared first
_ROWS = 4096  # rows compared at a time


class TiedHeadPass(GraphPass):
    """Make a head whose weight is the transposed embedding read the embedding."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Compare the embedding with the weight of the product that computes ``logits``."""
        embedding = _embedding(graph)
        head = _head(graph)
        if embedding is None or head is None:
            return
        table, matrix = embedding.inputs[0], head.inputs[1]
        if _transpose_source(table) is not None and _transpose_source(table) is matrix:
            table = self._stored_once(graph, embedding, matrix)
        elif _transpose_source(matrix) is not table and not _is_transposed(weight(table), weight(matrix)):
            return
        if table is not None:
            _read_embedding(graph, head, table)
            self.fired += 1

    @staticmethod
    def _stored_once(graph: ir.Graph, embedding: ir.Node, matrix: ir.Value | None) -> ir.Value | None:
        tensor = weight(matrix)
        if tensor is None or matrix is None:
            return None
        table = add_initializer(graph, f"{matrix.name}.embedding", transpose(tensor))
        old = embedding.inputs[0]
        embedding.replace_input_with(0, table)
        remove_unused(graph, old.producer() if old is not None else None)
        return table


def _transpose_source(value: ir.Value | None) -> ir.Value | None:
    """Return x if ``value`` is Transpose(x), else None."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    return node.inputs[0]


def _embedding(graph: ir.Graph) -> ir.Node | None:
    found = (node for node in nodes_of(graph, "Gather") if node.inputs[1] is not None)
    return next((node for node in found if node.inputs[1] and node.inputs[1].name == INPUT_IDS), None)


def _head(graph: ir.Graph) -> ir.Node | None:
    """Return the MatMul with a weight that computes the logits."""
    value = next((value for value in graph.outputs if value.name == LOGITS), None)
    for _ in range(8):
        node = value.producer() if value is not None else None
        if node is None or node.domain:
            return None
        if node.op_type == "MatMul":
            tensor = weight(_transpose_source(node.inputs[1]) or node.inputs[1])
            return node if tensor is not None and len(tensor.shape) == 2 else None
        value = next((x for x in node.inputs if x is not None and x.const_value is None), None)
    return None


def _is_transposed(table: ir.TensorProtocol | None, matrix: ir.TensorProtocol | None) -> bool:
    """Return whether one weight is the transpose of the other; compared in pieces of 4096 rows."""
    if table is None or matrix is None or len(table.shape) != 2 or table.dtype != matrix.dtype:
        return False
    if isinstance(table, ir.LazyTensor) or isinstance(matrix, ir.LazyTensor):
        return False  # a comparison would evaluate both completely
    if shape_of(table) != shape_of(matrix)[::-1]:
        return False
    left, right = table.numpy(), matrix.numpy()
    if not np.array_equal(left[:_SAMPLE], right[:, :_SAMPLE].T):
        return False
    return all(
        np.array_equal(left[row : row + _ROWS], right[:, row : row + _ROWS].T)
        for row in range(0, len(left), _ROWS)
    )


def _read_embedding(graph: ir.Graph, head: ir.Node, table: ir.Value) -> None:
    x, matrix, tensor = head.inputs[0], head.inputs[1], weight(table)
    if x is None or matrix is None or tensor is None:
        raise AssertionError("unreachable: the head was checked")
    stored = matrix.is_initializer()
    vocabulary, width = shape_of(tensor)
    replace(head.outputs[0], tied_product(head, x, table, vocabulary, width))
    remove_unused(graph, head)
    if stored and not matrix.uses():
        graph.initializers.pop(str(matrix.name), None)


def tied_product(before: ir.Node, x: ir.Value, table: ir.Value, vocabulary: int, width: int) -> ir.Value:
    """Write x times the transpose of a table [vocabulary, width], in the form of the canonical tied head."""
    graph = before.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {before.name} does not belong to a graph")
    flat = shared_constant(graph, f"head.rows_{width}", np.array([-1, width], np.int64))
    rows = insert(before, "Reshape", [x, flat]).outputs[0]
    product = insert(before, "Gemm", [rows, table], {"transB": 1}).outputs[0]
    lead = insert(before, "Shape", [x], {"start": 0, "end": -1}).outputs[0]
    last = shared_constant(graph, f"head.vocabulary_{vocabulary}", np.array([vocabulary], np.int64))
    shape = insert(before, "Concat", [lead, last], {"axis": 0}).outputs[0]
    return insert(before, "Reshape", [product, shape]).outputs[0]
