"""Fold Transpose of a weight into a lazily transposed weight, unless the weight has other consumers."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import add_initializer, nodes_of, remove_unused, replace, weight
from ...graph.lazy import bits_of, shape_of, transpose
from ..base import GraphPass

_MIN_BITS = 8


class FoldTransposesPass(GraphPass):
    """Store matrices in the orientation in which they are multiplied."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Fold every transposition of a matrix without other consumers."""
        for node in nodes_of(graph, "Transpose"):
            source = node.inputs[0]
            tensor = weight(source)
            if source is None or tensor is None or len(shape_of(tensor)) != 2:
                continue
            if bits_of(tensor.dtype) < _MIN_BITS:
                self.refuse(node, f"its type {tensor.dtype} has less than {_MIN_BITS} bits")
                continue
            perm = node.attributes.get("perm")
            if perm is not None and list(perm.as_ints()) != [1, 0]:
                continue
            if len(source.uses()) > 1:
                self.refuse(node, "its matrix has other consumers, as that of a tied head")
                continue
            folded = add_initializer(graph, f"{source.name}.transposed", transpose(tensor))
            replace(node.outputs[0], folded)
            remove_unused(graph, node)
            self.fired += 1
