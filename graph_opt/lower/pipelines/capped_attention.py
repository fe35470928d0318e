"""Attention with bounded scores (softcap), written out for targets whose kernels cannot bound them."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import float_attribute, nodes_of
from .standard import DecomposeAttentionPass


class CappedAttentionPass(DecomposeAttentionPass):
    """Write all attention of a graph out where any of it is softcapped, since one cache serves one form."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention, or none."""
        if any(float_attribute(node, "softcap", 0.0) for node in nodes_of(graph, "Attention")):
            super().rewrite(graph)
