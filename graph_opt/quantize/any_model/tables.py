"""Quantize lookup tables, such as embeddings, to int8 with a scale per row.

    Gather(W, ids) -> Cast(Gather(Wq, ids)) * Gather(scales, ids)

So only the gathered rows are converted.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import onnx_ir as ir

from ....errors import GraphError
from ...graph.edit import add_initializer, insert, int_attribute, remove_unused, replace, weight
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass
from .grid import channel_scales, round_weight

_SMALLEST = 1 << 14  # elements; for smaller tables the nodes need more bytes than are saved


class TablePass(GraphPass):
    """Store lookup tables in int8, also for lookups in subgraphs.

    Args:
        exclude: names of tables that stay float.
    """

    oldest_opset: ClassVar[int] = 13  # that of DequantizeLinear with a scale a channel

    def __init__(self, *, exclude: Collection[str] = ()) -> None:
        super().__init__()
        self.exclude = frozenset(exclude)

    def rewrite(self, graph: ir.Graph) -> None:
        """Quantize every float initializer that is only read by row lookups."""
        for value in list(graph.initializers.values()):
            tensor = weight(value)
            if tensor is None or value.name in self.exclude or not _is_table(value, tensor):
                continue
            _quantize(graph, value, tensor)
            self.fired += 1


def _is_table(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    shape, uses = shape_of(tensor), list(value.uses())
    if tensor.dtype != ir.DataType.FLOAT or len(shape) != 2 or math.prod(shape) < _SMALLEST:
        return False
    return not value.is_graph_output() and all(
        use.node.op_type == "Gather"
        and not use.node.domain
        and use.idx == 0
        and int_attribute(use.node, "axis", 0) in (0, -2)
        for use in uses
    )


def _quantize(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    name = str(value.name)
    try:
        scales = channel_scales(tensor.numpy(), 0)
    except GraphError as error:
        raise GraphError(f"table {name} cannot be quantized: {error}") from error
    levels = lazy(lambda: round_weight(tensor.numpy(), 0, scales), ir.DataType.INT8, shape_of(tensor))
    rows = add_initializer(graph, f"{name}.values", levels)
    factors = add_initializer(graph, f"{name}.scales", scales.reshape(-1, 1))
    for use in list(value.uses()):
        node, indices = use.node, use.node.inputs[1]
        found = insert(node, "Gather", [rows, indices], {"axis": 0})
        factor = insert(node, "Gather", [factors, indices], {"axis": 0})
        floats = insert(node, "Cast", [found.outputs[0]], {"to": ir.DataType.FLOAT.value})
        result = insert(node, "Mul", [floats.outputs[0], factor.outputs[0]]).outputs[0]
        output, called, owner = node.outputs[0], node.outputs[0].name, node.graph
        replace(output, result)
        if isinstance(owner, ir.Graph):
            remove_unused(owner, node)
        result.name = called
    del graph.initializers[name]
