"""Remove nodes and initializers without readers, and keep the inputs that an operator counts."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..graph.opset_forms import least_inputs


class RemoveUnusedNodesPass(common.RemoveUnusedNodesPass):
    """onnx_ir's pass, which also drops empty inputs at the end of every node, where that is allowed.

    A Loop without a condition needs its empty second input, and operators of other domains may count theirs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove the unused, then restore the number of inputs."""
        version = model.opset_imports.get("", 0)
        bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        open_ended = [
            (node, len(node.inputs))
            for body in bodies
            for node in body.all_nodes()
            if node.inputs and node.inputs[-1] is None
        ]
        result = super().call(model)
        for node, count in open_ended:
            least = count if node.domain else min(least_inputs(node, version), count)
            if node.graph is not None and len(node.inputs) < least:
                node.resize_inputs(least)
        return result
