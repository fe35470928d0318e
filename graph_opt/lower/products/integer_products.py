"""Integer products of one input, side by side: one kernel call for all, as ``merge.py`` does for floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, remove_unused, replace, sole_consumer, weight
from ...graph.lazy import concat_last, lazy, shape_of

# Makes the node of the product, given weights, column scales, their zero points and perhaps a bias.
Kernel = Callable[[Sequence[ir.Value]], ir.Node]


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a stored int8 weight: ``scaled`` is the float product, ``output`` that with the bias."""

    node: ir.Node
    name: str
    values: ir.TensorProtocol
    scales: ir.TensorProtocol  # [out]
    bias: ir.TensorProtocol | None
    scaled: ir.Value
    output: ir.Value


def product_of(
    node: ir.Node, values: ir.Value | None, scales: ir.Value | None, output: ir.Value
) -> Product | str:
    """Describe a product whose weight and scales are these, or say why no kernel can compute it."""
    stored, factors = weight(values), weight(scales)
    if values is None or stored is None or stored.dtype != ir.DataType.INT8 or len(shape_of(stored)) != 2:
        return "the product is not of an int8 weight"
    columns = shape_of(stored)[1]
    if factors is None or shape_of(factors) not in ((columns,), (1,), ()):
        return "the weight has no scale a column"
    name, factors = str(values.name), _a_column(factors, columns)
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Add":
        bias = next((weight(value) for value in reader.inputs if value is not output), None)
        if bias is not None and shape_of(bias) == (columns,):
            return Product(node, name, stored, factors, bias, output, reader.outputs[0])
    return Product(node, name, stored, factors, None, output, output)


def lower_products(graph: ir.Graph, before: ir.Node, products: Iterable[Product], kernel: Kernel) -> int:
    """Compute products of one input by one kernel, those with a bias apart from those without.

    Args:
        graph: that of the products.
        before: a node that everything is inserted in front of.
        products: of the same input.
        kernel: makes the node in front of ``before``.

    Returns:
        How many kernels there are now.
    """
    groups: dict[bool, list[Product]] = defaultdict(list)
    for product in products:
        groups[product.bias is None].append(product)
    for group in groups.values():
        _lower(graph, before, sorted(group, key=_operand_order), kernel)
    return len(groups)


def _a_column(scales: ir.TensorProtocol, columns: int) -> ir.TensorProtocol:
    """Repeat one scale in all for every column."""
    if shape_of(scales) == (columns,):
        return scales
    return lazy(lambda: np.full(columns, scales.numpy().reshape(())), scales.dtype, (columns,))


def _operand_order(product: Product) -> int:
    """Sort q before k before v where one attention reads them; otherwise the order stays as it is."""
    uses = [use for use in product.output.uses() if use.node.op_type == "GroupQueryAttention"]
    return uses[0].idx if uses else 0


def _lower(graph: ir.Graph, before: ir.Node, group: Sequence[Product], kernel: Kernel) -> None:
    stem = "+".join(product.name for product in group)
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
    zeros = add_initializer(graph, f"{stem}.zero_points", np.zeros(sum(sizes), np.int8))
    lowered = kernel([values, scales, zeros, *bias])
    lowered.name = group[0].node.name
    outputs: Sequence[ir.Value] = lowered.outputs
    if len(group) > 1:
        split = add_initializer(graph, f"{stem}.sizes", np.array(sizes, np.int64))
        operands = [lowered.outputs[0], split]
        outputs = insert(before, "Split", operands, {"axis": -1}, num_outputs=len(group)).outputs
    for product, output in zip(group, outputs, strict=True):
        replace(product.output, output)
        remove_unused(graph, product.output.producer())
