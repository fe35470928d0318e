"""Merge integer products of one input into one kernel call, as ``merge.py`` does for floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...graph.edit import add_initializer, insert, remove_unused, replace, sole_consumer, weight
from ...graph.lazy import concat_last, lazy, shape_of

# Inserts the node of the product, given weights, column scales, zero points and an optional bias.
Kernel = Callable[[Sequence[ir.Value]], ir.Node]


@dataclass(frozen=True, slots=True)
class Product:
    """A product with an int8 weight; ``scaled`` is the float product, ``output`` includes the bias."""

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
    """Return the product with these weights and scales, or why no kernel can compute it."""
    stored, factors = weight(values), weight(scales)
    if values is None or stored is None or stored.dtype != ir.DataType.INT8 or len(shape_of(stored)) != 2:
        return "the weight is not a constant int8 matrix"
    columns = shape_of(stored)[1]
    if factors is None or shape_of(factors) not in ((columns,), (1,), ()):
        return "the weight has no scales per column"
    name, factors = str(values.name), _a_column(factors, columns)
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Add":
        bias = next((weight(value) for value in reader.inputs if value is not output), None)
        if bias is not None and shape_of(bias) == (columns,):
            return Product(node, name, stored, factors, bias, output, reader.outputs[0])
    return Product(node, name, stored, factors, None, output, output)


def lower_products(graph: ir.Graph, before: ir.Node, products: Iterable[Product], kernel: Kernel) -> int:
    """Compute products of one input by one kernel for those with a bias, and one for those without.

    Args:
        graph: the graph of the products.
        before: new nodes are inserted in front of it.
        products: products of the same input.
        kernel: inserts the node in front of ``before``.

    Returns:
        The number of kernels, 0 to 2.
    """
    groups: dict[bool, list[Product]] = defaultdict(list)
    for product in products:
        groups[product.bias is None].append(product)
    for group in groups.values():
        _lower(graph, before, sorted(group, key=_operand_order), kernel)
    return len(groups)


def _a_column(scales: ir.TensorProtocol, columns: int) -> ir.TensorProtocol:
    """Return the scales with one per column, repeated if there is only one."""
    if shape_of(scales) == (columns,):
        return scales
    return lazy(lambda: np.full(columns, scales.numpy().reshape(())), scales.dtype, (columns,))


def _operand_order(product: Product) -> int:
    """Return a sort key that orders q, k and v of one attention; all others are equal."""
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
