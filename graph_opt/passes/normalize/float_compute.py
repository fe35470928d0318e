"""Convert 16-bit float graphs to fp32, for targets without 16-bit kernels; weights are converted lazily.

onnxruntime's CPU provider has few fp16 kernels on x86-64 and no bf16 kernels. It would cast every weight at
every run, or refuse the graph.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ...graph.edit import int_attribute, nodes_of, replace
from ...graph.lazy import HALVES, Halves, lazy, shape_of
from ..base import GraphPass

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


class FloatComputePass(GraphPass):
    """Convert all 16-bit floats of a graph to fp32, including inputs and outputs, and remove casts.

    Args:
        keep: graphs with initializers of these types are not changed.
    """

    def __init__(self, *, keep: Collection[ir.DataType] = ()) -> None:
        super().__init__()
        self._keep = frozenset(keep)

    def rewrite(self, graph: ir.Graph) -> None:
        """Change weights, types and casts."""
        if any(value.dtype in self._keep for value in graph.initializers.values()):
            return
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in _HALF:
                value.const_value = _widened(value.const_value)
                self.fired += 1
        outputs = [value for node in graph for value in node.outputs]
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            if value.dtype in _HALF:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for node in nodes_of(graph, "Cast"):
            _drop_cast(graph, node)


def _drop_cast(graph: ir.Graph, node: ir.Node) -> None:
    target, source = ir.DataType(int_attribute(node, "to", 0)), node.inputs[0]
    if target not in (*_HALF, ir.DataType.FLOAT) or source is None:
        return
    node.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT.value))
    if source.dtype == ir.DataType.FLOAT and not (source.is_graph_input() or source.is_initializer()):
        replace(node.outputs[0], source)
        graph.remove(node, safe=True)


def _widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    wide = lazy(lambda: tensor.numpy().astype(np.float32), ir.DataType.FLOAT, shape_of(tensor))
    wide.name = tensor.name
    wide.meta[HALVES] = Halves(tensor.dtype, lambda: tensor.numpy().view(np.uint16))
    return wide
