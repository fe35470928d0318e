"""Remove nodes and initializers without readers, and keep the inputs that an operator counts."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..graph.edit import subgraphs
from ..graph.opset_forms import least_inputs


class RemoveUnusedNodesPass(common.RemoveUnusedNodesPass):
    """onnx_ir's pass, which also drops empty inputs at the end of every node, where that is allowed.

    A Loop without a condition needs its empty second input, and operators of other domains may count theirs.
    onnx_ir looks at the schema of every node, which takes most of its time. So it only runs where a node has
    optional inputs or outputs that it may drop.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove the unused, then restore the number of inputs."""
        bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
        count = sum(_remove_nodes(body) for body in bodies) + _remove_initializers(model.graph)
        if any(map(_has_open_ends, bodies)):
            return ir.passes.PassResult(model, modified=self._close_ends(model, bodies) or count > 0)
        return ir.passes.PassResult(model, modified=count > 0)

    def _close_ends(self, model: ir.Model, bodies: list[ir.Graph | ir.Function]) -> bool:
        version = model.opset_imports.get("", 0)
        open_ended = [
            (node, len(node.inputs))
            for body in bodies
            for node in body.all_nodes()
            if node.inputs and node.inputs[-1] is None
        ]
        modified = super().call(model).modified
        for node, count in open_ended:
            least = count if node.domain else min(least_inputs(node, version), count)
            if node.graph is not None and len(node.inputs) < least:
                node.resize_inputs(least)
        return modified


def _remove_nodes(body: ir.Graph | ir.Function) -> int:
    """Remove the nodes of a graph and its subgraphs without readers; return their number."""
    outputs, unused, count = frozenset(body.outputs), set[ir.Node](), 0
    for node in reversed(body):
        if any(use.node not in unused for value in node.outputs for use in value.uses()):
            count += sum(map(_remove_nodes, subgraphs(node)))
        elif outputs.isdisjoint(node.outputs):
            unused.add(node)
        else:
            count += sum(map(_remove_nodes, subgraphs(node)))
    if unused:
        body.remove(unused, safe=True)
    return count + len(unused)


def _remove_initializers(graph: ir.Graph) -> int:
    kept = {*graph.outputs, *graph.inputs}
    unused = [value for value in graph.initializers.values() if not value.uses() and value not in kept]
    for value in unused:
        del graph.initializers[str(value.name)]
    return len(unused)


def _has_open_ends(body: ir.Graph | ir.Function) -> bool:
    """Return whether a node has an empty input at its end, or an output without readers."""
    outputs = frozenset(body.outputs)
    for node in body:
        if node.op_type == "BatchNormalization" or (
            not node.domain and node.inputs and node.inputs[-1] is None
        ):
            return True
        values = node.outputs
        if len(values) > 1 and any(not value.uses() and value not in outputs for value in values):
            return True
        if any(map(_has_open_ends, subgraphs(node))):
            return True
    return False
