"""Nodes that compute the same -> one of them."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


class MergeDuplicatesPass(common.CommonSubexpressionEliminationPass):
    """onnx_ir's elimination of common subexpressions, which keeps what a graph states about its outputs."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Merge; an output then made by another node gets its type and shape back."""
        stated = [(value.type, value.shape) for value in model.graph.outputs]
        result = super().call(model)
        for value, (type_, shape) in zip(model.graph.outputs, stated, strict=True):
            value.type, value.shape = value.type or type_, value.shape or shape
        return result
