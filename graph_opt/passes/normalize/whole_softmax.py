"""Rewrite Reshape(Softmax(Flatten(x))), which ``older_forms`` writes for unknown ranks, as Softmax(x)."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import certainly_equal, insert, int_attribute, remove_unused, replace, sole_consumer
from ..base import EveryGraphPass

_KINDS = frozenset({"Hardmax", "LogSoftmax", "Softmax"})


class WholeSoftmaxPass(EveryGraphPass):
    """Rewrite Reshape(Softmax(Flatten(x))) as Softmax(x) if the flattened rows are the last axis of x."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Softmax, LogSoftmax and Hardmax."""
        for node in list(graph):
            if node.op_type not in _KINDS or node.domain or int_attribute(node, "axis", -1) not in (-1, 1):
                continue
            rows = node.inputs[0].producer() if node.inputs[0] is not None else None
            last = sole_consumer(node.outputs[0])
            if rows is None or last is None or (rows.op_type, last.op_type) != ("Flatten", "Reshape"):
                continue
            x, result = rows.inputs[0], last.outputs[0]
            if x is None or x.shape is None or last.graph is not graph or rows.domain or last.domain:
                continue
            rank = len(x.shape)
            if int_attribute(rows, "axis", 1) % rank != rank - 1 or not _restores(last, x):
                continue
            made = insert(last, node.op_type, [x], {"axis": -1})
            made.name = node.name
            replace(result, made.outputs[0])
            remove_unused(graph, last)
            self.fired += 1


def _restores(last: ir.Node, x: ir.Value) -> bool:
    """Return whether a Reshape restores the shape of ``x``."""
    target = last.inputs[1].producer() if last.inputs[1] is not None else None
    if target is not None and target.op_type == "Shape" and not target.domain and not target.attributes:
        return target.inputs[0] is x
    return certainly_equal(x.shape, last.outputs[0].shape)
