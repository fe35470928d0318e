"""Products of dynamically quantized inputs -> com.microsoft DynamicQuantizeMatMul, one for all of an input.

Cast(MatMulInteger(DynamicQuantizeLinear(x), W)) * (x_scale * W_scale) + bias
    -> DynamicQuantizeMatMul(x, W, W_scale, 0, bias)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..edit import (
    MICROSOFT,
    add_initializer,
    insert,
    nodes_of,
    remove_unused,
    replace,
    sole_consumer,
    weight,
)
from ..lazy import concat_last, shape_of
from ..passes.base import GraphPass


@dataclass(frozen=True, slots=True)
class _Product:
    node: ir.Node
    values: ir.TensorProtocol
    scales: ir.TensorProtocol
    bias: ir.TensorProtocol | None
    output: ir.Value


class DynamicProductsPass(GraphPass):
    """Lower the products of every ``DynamicQuantizeLinear``, those of one input side by side."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Lower all groups."""
        for source in list(nodes_of(graph, "DynamicQuantizeLinear")):
            groups: dict[bool, list[_Product]] = defaultdict(list)
            for use in list(source.outputs[0].uses()):
                found = _product(source, use.node)
                if isinstance(found, str):
                    self.refuse(use.node, found)
                    continue
                groups[found.bias is None].append(found)
            for group in groups.values():
                _lower(graph, source, sorted(group, key=_operand_order))
                self.fired += 1


def _product(source: ir.Node, node: ir.Node) -> _Product | str:
    """Describe a product, or say why the kernel cannot compute it."""
    if node.op_type != "MatMulInteger" or len(node.inputs) != 3 or node.inputs[2] is not source.outputs[2]:
        return "its input is no product with a symmetric weight"
    values = weight(node.inputs[1])
    cast = sole_consumer(node.outputs[0])
    scaling = sole_consumer(cast.outputs[0]) if cast is not None and cast.op_type == "Cast" else None
    if values is None or values.dtype != ir.DataType.INT8 or scaling is None or scaling.op_type != "Mul":
        return "the product is not of an int8 weight, or not scaled right after it"
    factors = [value.producer() for value in scaling.inputs if value is not None]
    both = next((one for one in factors if one is not None and one.op_type == "Mul"), None)
    if both is None or source.outputs[1] not in both.inputs:
        return "the product is not scaled by the scale of its input"
    scales = next((weight(value) for value in both.inputs if value is not source.outputs[1]), None)
    columns = shape_of(values)[-1]
    if scales is None or shape_of(scales) not in ((columns,), (1,), ()):
        return "the weight has no scale a column"
    return _with_bias(node, values, scales, scaling.outputs[0], columns)


def _with_bias(
    node: ir.Node, values: ir.TensorProtocol, scales: ir.TensorProtocol, output: ir.Value, columns: int
) -> _Product:
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Add":
        bias = next((weight(value) for value in reader.inputs if value is not output), None)
        if bias is not None and shape_of(bias) == (columns,):
            return _Product(node, values, scales, bias, reader.outputs[0])
    return _Product(node, values, scales, None, output)


def _operand_order(product: _Product) -> int:
    """Sort q before k before v where one attention reads them; otherwise the order stays as it is."""
    uses = [use for use in product.output.uses() if use.node.op_type == "GroupQueryAttention"]
    return uses[0].idx if uses else 0


def _lower(graph: ir.Graph, source: ir.Node, group: Sequence[_Product]) -> None:
    names = [str(product.node.inputs[1].name) for product in group if product.node.inputs[1] is not None]
    stem = "+".join(names)
    sizes = [shape_of(product.values)[1] for product in group]
    parts = {
        "": [product.values for product in group],
        ".column_scales": [product.scales for product in group],
        ".bias": [product.bias for product in group if product.bias is not None],
    }
    values, scales, *bias = (
        add_initializer(graph, f"{stem}{what}", concat_last(tensors))
        for what, tensors in parts.items()
        if tensors
    )
    zero = add_initializer(graph, f"{stem}.zero_points", np.zeros(sum(sizes), np.int8))
    operands = [source.inputs[0], values, scales, zero, *bias]
    lowered = insert(source, "DynamicQuantizeMatMul", operands, domain=MICROSOFT)
    lowered.name = group[0].node.name
    outputs: Sequence[ir.Value] = lowered.outputs
    if len(group) > 1:
        split = add_initializer(graph, f"{stem}.sizes", np.array(sizes, np.int64))
        outputs = insert(
            source, "Split", [lowered.outputs[0], split], {"axis": -1}, num_outputs=len(group)
        ).outputs
    for product, output in zip(group, outputs, strict=True):
        replace(product.output, output)
        remove_unused(graph, product.output.producer())
