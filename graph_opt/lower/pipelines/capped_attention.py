"""Decompose attention with softcap, for targets whose kernels do not support it."""

from __future__ import annotations

import onnx_ir as ir

from ....contract import EXPLICIT_KV
from ...graph.edit import float_attribute, nodes_of
from .standard import DecomposeAttentionPass


class CappedAttentionPass(DecomposeAttentionPass):
    """Decompose all attentions of a graph if any has a softcap: all must use the same form of cache."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``; store the reason of its explicit KV in its metadata."""
        result = super().call(model)
        if result.modified:
            model.metadata_props[EXPLICIT_KV] = "attention has a softcap, which the target's kernel lacks"
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention, or none."""
        if any(float_attribute(node, "softcap", 0.0) for node in nodes_of(graph, "Attention")):
            super().rewrite(graph)
