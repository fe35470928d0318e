"""Merge integer products of one input into one kernel call, as ``merge.py`` does for floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import add_initializer, constant, insert, remove_unused, replace, sole_consumer, weight
from ...graph.lazy import Array, concat_last, lazy, shape_of

_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)

# Inserts the node of the product, given weights, column scales, zero points and an optional bias.
Kernel = Callable[[Sequence[ir.Value]], ir.Node]


@dataclass(frozen=True, slots=True)
class Product:
    """A product with an int8 weight [in, out].

    ``scaled`` is the float product, ``output`` includes the bias.
    """

    node: ir.Node
    name: str
    values: ir.TensorProtocol
    scales: ir.TensorProtocol  # [out]
    zeros: ir.TensorProtocol | None  # zero points int8 [out]; None if all are 0
    bias: ir.TensorProtocol | None
    scaled: ir.Value
    output: ir.Value


def product_of(
    node: ir.Node,
    values: ir.Value | None,
    scales: ir.Value | None,
    output: ir.Value,
    zeros: ir.Value | None = None,
) -> Product | str:
    """Return the product with these weights, or why no kernel can compute it.

    Args:
        node: the product.
        values: int8 or uint8 [in, out]; unsigned ones become signed.
        scales: one for each column, or one.
        output: the float product.
        zeros: zero points of the type of the weights, one for each column or one; None for zeros.
    """
    stored, factors = weight(values), weight(scales)
    if values is None or stored is None or stored.dtype not in _BYTES or len(shape_of(stored)) != 2:
        return "the weight is not a constant matrix of 8 bits"
    columns = shape_of(stored)[1]
    if factors is None or shape_of(factors) not in ((columns,), (1,), ()):
        return "the weight has no scales per column"
    points = np.zeros(1, stored.dtype.numpy()) if zeros is None else constant(zeros)
    if points is None or points.shape not in ((columns,), (1,), ()):
        return "the weight has no constant zero points per column"
    name, factors = str(values.name), _a_column(factors, columns)
    stored, points = _signed(stored), _signed_bytes(points)
    middles = ir.tensor(np.full(columns, points)) if points.any() else None
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Add":
        bias = next((weight(value) for value in reader.inputs if value is not output), None)
        if bias is not None and shape_of(bias) == (columns,):
            return Product(node, name, stored, factors, middles, bias, output, reader.outputs[0])
    return Product(node, name, stored, factors, middles, None, output, output)


def _signed(values: ir.TensorProtocol) -> ir.TensorProtocol:
    if values.dtype == ir.DataType.INT8:
        return values
    return lazy(lambda: _signed_bytes(values.numpy()), ir.DataType.INT8, shape_of(values))


def _signed_bytes(values: Array) -> npt.NDArray[np.int8]:
    """Return bytes less 128 if they are unsigned: differences of weights and zero points stay."""
    return values if values.dtype == np.int8 else (values ^ np.uint8(0x80)).view(np.int8)


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
    points = [
        np.zeros(size, np.int8) if product.zeros is None else product.zeros.numpy()
        for product, size in zip(group, sizes, strict=True)
    ]
    zeros = add_initializer(graph, f"{stem}.zero_points", np.concatenate(points))
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
