"""Rewrite norms of heads from [batch, sequence * heads, head_dim] to [batch, sequence, heads, head_dim]."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    insert,
    int_attribute,
    remove_unused,
    replace,
    shared_constant,
    sole_consumer,
    static_size,
)
from ..base import GraphPass

_NORMS = frozenset({"RMSNormalization", "LayerNormalization"})


class HeadNormsPass(GraphPass):
    """Give heads a separate axis where they are normalised."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite norms between two reshapes."""
        for node in [node for node in graph if node.op_type in _NORMS and not node.domain]:
            source, last = _joined(node)
            width, size = static_size(source, -1), static_size(node.inputs[0], -1)
            if source is None or last is None or width is None or size is None or width % size:
                continue
            split = _reshaped(graph, node, source, [0, 0, width // size, size])
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            normed = insert(node, node.op_type, [split, *node.inputs[1:]], attributes | {"axis": -1})
            normed.name = node.name
            replace(last.outputs[0], _reshaped(graph, node, normed.outputs[0], [0, 0, width]))
            remove_unused(graph, last)
            self.fired += 1


def _joined(node: ir.Node) -> tuple[ir.Value | None, ir.Node | None]:
    """Return the input of the Reshape before a norm, and the Reshape after it that restores the shape."""
    first = node.inputs[0].producer() if node.inputs[0] is not None else None
    last = sole_consumer(node.outputs[0]) if len(node.outputs) == 1 else None
    if first is None or last is None or first.op_type != "Reshape" or last.op_type != "Reshape":
        return None, None
    shapes = [value.shape for value in (first.inputs[0], first.outputs[0], last.outputs[0]) if value]
    of_rank_3 = all(shape is not None and len(shape) == 3 for shape in shapes)
    if not of_rank_3 or shapes[0] != shapes[-1] or int_attribute(node, "axis", -1) not in (-1, 2):
        return None, None
    return first.inputs[0], last


def _reshaped(graph: ir.Graph, before: ir.Node, value: ir.Value, shape: list[int]) -> ir.Value:
    target = shared_constant(graph, "shape." + "_".join(map(str, shape)), np.array(shape, np.int64))
    made = insert(before, "Reshape", [value, target]).outputs[0]
    axes = list(value.shape or ())[:2]
    made.type, made.shape = value.type, ir.Shape([*axes, *shape[2:]]) if len(axes) == 2 else None
    return made
