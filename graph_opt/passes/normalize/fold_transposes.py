"""Transpose of a weight -> the weight transposed, lazily; a table that is read as it stands as well stays."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import add_initializer, nodes_of, remove_unused, replace, weight
from ...graph.lazy import bits_of, shape_of, transpose
from ..base import GraphPass

_NARROWEST = 8  # bits


class FoldTransposesPass(GraphPass):
    """Store matrices the way they are multiplied."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Fold every transposition of a matrix that nothing else reads."""
        for node in nodes_of(graph, "Transpose"):
            source = node.inputs[0]
            tensor = weight(source)
            if source is None or tensor is None or len(shape_of(tensor)) != 2:
                continue
            if bits_of(tensor.dtype) < _NARROWEST:
                self.refuse(node, f"it is of type {tensor.dtype}, not of whole bytes")
                continue
            perm = node.attributes.get("perm")
            if perm is not None and list(perm.as_ints()) != [1, 0]:
                continue
            if len(source.uses()) > 1:
                self.refuse(node, "its matrix is read as it stands as well, as that of a tied head")
                continue
            folded = add_initializer(graph, f"{source.name}.transposed", transpose(tensor))
            replace(node.outputs[0], folded)
            remove_unused(graph, node)
            self.fired += 1
