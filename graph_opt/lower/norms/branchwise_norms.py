"""Lower Reshape(RMSNormalization(Reshape(x))) over heads to com.microsoft BranchwiseRMSNorm without reshapes.

Two norms of q and k with one scale vector each take 1/2 to 1/7 of the time of a joint norm with a scale per
head: all norm kernels are slow on scales of more than one axis.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    constant,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ...graph.lazy import shape_of
from ...passes.base import GraphPass


class BranchwiseNormsPass(GraphPass):
    """Normalise the heads of [batch, sequence, heads * head_dim] without reshaping it."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every norm of heads between two reshapes."""
        for norm in nodes_of(graph, "RMSNormalization"):
            first = norm.inputs[0].producer() if norm.inputs[0] is not None else None
            if first is None or first.op_type != "Reshape":
                continue
            last = sole_consumer(norm.outputs[0])
            heads = _heads(first, norm, last)
            if last is None or isinstance(heads, str):
                self.refuse(norm, str(heads))
                continue
            attributes = {"epsilon": float_attribute(norm, "epsilon", 1e-5), "num_branches": heads}
            operands = [first.inputs[0], norm.inputs[1]]
            lowered = insert(norm, "BranchwiseRMSNorm", operands, attributes, domain=MICROSOFT)
            lowered.name = norm.name
            replace(last.outputs[0], lowered.outputs[0])
            remove_unused(graph, last)
            self.fired += 1


def _heads(first: ir.Node, norm: ir.Node, last: ir.Node | None) -> int | str:
    """Return the number of heads, or why the norm is not between reshapes from and to [.., heads * size]."""
    if last is None or last.op_type != "Reshape":
        return "its output is not reshaped back"
    scale, apart, flat = weight(norm.inputs[1]), constant(first.inputs[1]), constant(last.inputs[1])
    if scale is None or len(shape_of(scale)) != 1:
        return "its scale is not a vector"
    if int_attribute(norm, "axis", -1) not in (-1, 3):
        return "it normalises other axes than the last"
    size = shape_of(scale)[0]
    if apart is None or len(apart) != 4 or list(apart[:2]) != [0, 0] or apart[3] != size or apart[2] < 1:
        return "its input is not reshaped to [batch, sequence, heads, head_dim]"
    if flat is None or list(flat) not in ([0, 0, apart[2] * size], [0, 0, -1]):
        return "its output is not reshaped to [batch, sequence, heads * head_dim]"
    return int(apart[2])
