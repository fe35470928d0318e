"""Read sizes from the inputs of a graph instead of from values that are computed from them.

A trace takes the number of tokens from the shape of the embeddings. A mask then depends on the tables of the
model, and can only be evaluated together with them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...analysis.shape_facts import ShapeFacts
from ...graph.edit import constant, insert, nodes_of, remove_unused, shared_constant
from ..base import GraphPass


class ShapesOfInputsPass(GraphPass):
    """Replace the Shape of a value whose first axes are those of an input, and whose others are fixed.

    What holds for all sets of sizes of ``ShapeFacts`` is taken to hold.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every such Shape of all axes."""
        facts = ShapeFacts(graph, decoder=False)
        for node in nodes_of(graph, "Shape"):
            x, output = node.inputs[0], node.outputs[0]
            dims = None if x is None or x.is_graph_input() else facts.symbolic(x)
            if dims is None or node.attributes or output.is_graph_output():
                continue
            dynamic = [place for place, dim in enumerate(dims) if not isinstance(dim, int)]
            leading = dynamic[-1] + 1 if dynamic else 0
            source = _input_with(graph, facts, list(dims)[:leading])
            if source is None:
                continue
            shape = insert(node, "Shape", [source], {"start": 0, "end": leading}).outputs[0]
            for use in list(output.uses()):
                if not _takes_first(use.node, leading):
                    continue
                use.node.replace_input_with(use.idx, shape)
            if output.uses():
                fixed = np.array(list(dims)[leading:], np.int64)
                name = "sizes_" + "_".join(map(str, fixed.tolist()))
                parts = [shape, shared_constant(graph, name, fixed)]
                output.replace_all_uses_with(insert(node, "Concat", parts, {"axis": 0}).outputs[0])
            remove_unused(graph, node)
            self.fired += 1


def _takes_first(node: ir.Node, count: int) -> bool:
    """Return whether a node takes some of the first ``count`` elements of its first input."""
    places = constant(node.inputs[1]) if node.op_type == "Gather" and not node.domain else None
    return places is not None and bool(((places >= 0) & (places < count)).all())


def _input_with(graph: ir.Graph, facts: ShapeFacts, dims: list[int | ir.SymbolicDim]) -> ir.Value | None:
    """Return an input whose first axes are ``dims``, all of them known; None if there is none."""
    if not dims or any(not isinstance(dim, int) and dim.value is None for dim in dims):
        return None
    for value in graph.inputs:
        shape = facts.symbolic(value)
        if shape is not None and list(shape)[: len(dims)] == dims:
            return value
    return None
