"""Widen values between products to whole blocks, so that the second product can be quantized.

The inner size of a feed-forward layer need not be a multiple of a block: 4304 in SigLIP's towers, 3420 in
Qwen2.5-VL's. The first product gets further outputs of zeros, what is between computes each element alone,
and the second product multiplies them by zeros.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, nodes_of, weight
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass

# Functions of each element that are finite at 0.
_BY_ELEMENT = frozenset({"Add", "Gelu", "Mul", "Relu", "Sigmoid", "Swish", "Tanh"})


class PaddedProductsPass(GraphPass):
    """Widen the inputs of float products, with the products that compute them.

    Args:
        block: inputs of a block.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block

    def rewrite(self, graph: ir.Graph) -> None:
        """Widen what is between every two products, if nothing else reads it."""
        for product in list(nodes_of(graph, "MatMul")):
            size = _inputs(product)
            if size is None or size % self._block == 0 or product.inputs[0] is None:
                continue
            between = _between(product, size)
            if isinstance(between, str):
                self.refuse(product, between)
                continue
            extra = -size % self._block
            for node in between:
                for place, value in enumerate(node.inputs):
                    if value is not None and weight(value) is not None and _ends_with(value, size):
                        node.replace_input_with(place, _padded(graph, value, -1, extra))
                output = node.outputs[0]
                if output.shape is not None:
                    output.shape = ir.Shape([*list(output.shape)[:-1], size + extra])
            product.replace_input_with(1, _padded(graph, product.inputs[1], 0, extra))
            self.fired += 1


def _inputs(product: ir.Node) -> int | None:
    """Return the inputs of a product with a float weight [inputs, outputs]; None for others."""
    tensor = weight(product.inputs[1])
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    return shape_of(tensor)[0]


def _between(product: ir.Node, size: int) -> list[ir.Node] | str:
    """Return the nodes from the first products on, which compute ``size`` elements; or why they stay."""
    found, left = list[ir.Node](), [product.inputs[0]]
    while left:
        value = left.pop()
        node = None if value is None else value.producer()
        if value is None or node is None or value.is_graph_output():
            return "its inputs are not computed by a product"
        if node in found:
            continue
        found.append(node)
        if node.op_type == "MatMul" and not node.domain and _inputs(node) is not None:
            continue
        if node.op_type not in _BY_ELEMENT or node.domain:
            return f"{node.op_type} is in front of it"
        for operand in node.inputs:
            tensor = weight(operand)
            if tensor is None:
                left.append(operand)
            elif shape_of(tensor) not in ((), (1,), (size,)):
                return f"{node.op_type} in front of it reads a constant of another shape"
    readers = {use.node for node in found for use in node.outputs[0].uses()}
    return "something else reads its inputs" if readers - {product, *found} else found


def _ends_with(value: ir.Value, size: int) -> bool:
    return value.shape is not None and len(value.shape) > 0 and value.shape[-1] == size


def _padded(graph: ir.Graph, value: ir.Value | None, axis: int, extra: int) -> ir.Value:
    """Return a weight with zeros at the end of an axis."""
    tensor = weight(value)
    if value is None or tensor is None:
        raise AssertionError("unreachable: only weights are padded")
    shape = list(shape_of(tensor))
    widths = [(0, 0)] * len(shape)
    widths[axis] = (0, extra)
    shape[axis] += extra
    padded = lazy(lambda: np.pad(tensor.numpy(), widths), tensor.dtype, shape)
    return add_initializer(graph, f"{value.name}.padded", padded)
