"""Rewrite Norm(Transpose(x)) as Transpose(Norm(x)), the canonical order, if the last axis is not moved."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import insert, int_attribute, nodes_of, remove_unused, replace
from ..base import GraphPass


class NormBeforeTransposePass(GraphPass):
    """Move a Transpose that keeps the last axis behind the norm over that axis."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every norm of a transposed value."""
        for node in [*nodes_of(graph, "RMSNormalization"), *nodes_of(graph, "LayerNormalization")]:
            source = node.inputs[0]
            swap = source.producer() if source is not None else None
            if swap is None or swap.op_type != "Transpose" or "perm" not in swap.attributes:
                continue
            perm = list(swap.attributes["perm"].as_ints())
            last = len(perm) - 1
            if perm[-1] != last or int_attribute(node, "axis", -1) not in (-1, last):
                self.refuse(node, "the Transpose in front of it moves the normalised axis")
                continue
            if len(node.outputs) > 1:
                self.refuse(node, "it has more than one output")
                continue
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            normed = insert(node, node.op_type, [swap.inputs[0], *node.inputs[1:]], attributes)
            moved = insert(node, "Transpose", normed.outputs, {"perm": perm})
            replace(node.outputs[0], moved.outputs[0])
            remove_unused(graph, node)
            self.fired += 1
