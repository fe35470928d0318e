"""Replace DequantizeLinear of a constant weight by the float weight, if the target has no kernel for it.

This loses the memory savings of quantization. The floats are computed lazily, when the graph is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, int_attribute, nodes_of, replace, weight
from ...graph.lazy import Array, lazy, packed_bytes, shape_of, unpack_nibbles
from ...passes.base import GraphPass

Condition = Callable[[ir.Node], bool]


class DequantizeWeightsPass(GraphPass):
    """Store quantized weights as floats.

    Args:
        unless: returns whether the target supports a DequantizeLinear.
    """

    def __init__(self, unless: Condition = lambda node: False) -> None:
        super().__init__()
        self._unless = unless

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite nodes with constant operands."""
        for node in nodes_of(graph, "DequantizeLinear"):
            tensors = [weight(value) for value in node.inputs if value is not None]
            known = [tensor for tensor in tensors if tensor is not None]
            if len(known) < len(tensors) or self._unless(node):
                continue
            name = str(known[0].name).removesuffix(".values")
            floats = add_initializer(graph, f"{name}.floats", dequantized(node, known))
            replace(node.outputs[0], floats)
            graph.remove(node, safe=True)
            self.fired += 1


def is_signed(node: ir.Node, types: Collection[ir.DataType]) -> bool:
    """Return whether values have one of ``types``, full blocks and zero point 0, as TensorRT requires."""
    values = weight(node.inputs[0])
    zero = weight(node.inputs[2]) if len(node.inputs) > 2 else None
    if values is None or values.dtype not in types or (zero is not None and zero.numpy().any()):
        return False
    block, shape = int_attribute(node, "block_size", 0), shape_of(values)
    return not block or shape[int_attribute(node, "axis", 1) % len(shape)] % block == 0


def dequantized(node: ir.Node, tensors: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """Return the result of a DequantizeLinear as a lazy tensor.

    Args:
        node: the DequantizeLinear.
        tensors: its values, scales and, if any, zero points.
    """
    values, scales = tensors[:2]
    shape, dtype = shape_of(values), scales.dtype
    axis, block = int_attribute(node, "axis", 1) % max(len(shape), 1), int_attribute(node, "block_size", 0)

    def spread(parameters: Array) -> Array:
        if block:
            return np.repeat(parameters, block, axis=axis)[tuple(slice(size) for size in shape)]
        if parameters.size == 1:
            return parameters.reshape(())
        return parameters.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    def compute() -> Array:
        content = _integers(values).astype(np.float32)
        if len(tensors) > 2:
            content -= spread(_integers(tensors[2]).astype(np.float32))
        return (content * spread(scales.numpy().astype(np.float32))).astype(dtype.numpy())

    return lazy(compute, dtype, shape)


def _integers(tensor: ir.TensorProtocol) -> Array:
    if tensor.dtype.bitwidth != 4:
        return tensor.numpy()
    patterns = unpack_nibbles(packed_bytes(tensor), shape_of(tensor)).astype(np.int8)
    return np.where(patterns > 7, patterns - 16, patterns) if tensor.dtype == ir.DataType.INT4 else patterns
