"""com.microsoft MatMulNBits, GatherBlockQuantized -> DequantizeLinear in blocks, and MatMul, Gemm or Gather.

The kernels keep a weight [N, K / block, bytes of a block], unsigned around a zero point in the middle of the
range or one of its own. The canonical weight is [K, N]; an embedding, with the head tied to it, [N, K].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..edit import (
    MICROSOFT,
    add_initializer,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    weight,
)
from ..lazy import Array, lazy, pack_nibbles, packed_bytes, shape_of, unpack_nibbles
from .base import GraphPass
from .tied_head import tied_product


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The tensors of a kernel's weight of N outputs and K inputs."""

    stem: str
    packed: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    outputs: int
    inputs: int
    bits: int
    block_size: int

    @property
    def dtype(self) -> ir.DataType:
        """Signed where the zero point is in the middle of the range."""
        if self.zero_points is None:
            return ir.DataType.INT4 if self.bits == 4 else ir.DataType.INT8
        return ir.DataType.UINT4 if self.bits == 4 else ir.DataType.UINT8

    def values(self) -> Array:
        """Return the weight [N, K], as patterns of its type."""
        raw = packed_bytes(self.packed).reshape(-1)
        shape = (self.outputs, self.inputs)
        unsigned = unpack_nibbles(raw, shape) if self.bits == 4 else raw.reshape(shape)
        middle = np.uint8(1 << (self.bits - 1) if self.zero_points is None else 0)
        return unsigned ^ middle

    def points(self) -> Array:
        """Return the zero points [N, K / block]; every row of the kernel's is padded to whole bytes."""
        blocks = self.inputs // self.block_size
        if self.zero_points is None:
            raise AssertionError("unreachable: asked only where there are some")
        rows = self.zero_points.numpy().reshape(self.outputs, -1)
        if self.bits == 4:
            return unpack_nibbles(rows, (self.outputs, 2 * rows.shape[1]))[:, :blocks]
        return rows


class LiftWeightsPass(GraphPass):
    """Replace kernels on blocked weights."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[ir.TensorProtocol, ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace embeddings first, so that a head tied to one finds it."""
        self._tables = {}
        for op_type, lift in (
            ("GatherBlockQuantized", self._lift_gather),
            ("MatMulNBits", self._lift_product),
        ):
            for node in nodes_of(graph, op_type, MICROSOFT):
                found = _blocks(node)
                if isinstance(found, str):
                    self.refuse(node, found)
                    continue
                lift(graph, node, found)
                self.fired += 1

    def _lift_gather(self, graph: ir.Graph, node: ir.Node, found: _Blocks) -> None:
        table = _dequantized(graph, node, found, lambda array: array, axis=1)
        self._tables[found.packed] = table
        rows = insert(node, "Gather", [table, node.inputs[1]], {"axis": 0})
        rows.name = node.name
        _finish(graph, node, rows.outputs[0])

    def _lift_product(self, graph: ir.Graph, node: ir.Node, found: _Blocks) -> None:
        table = self._tables.get(found.packed)
        x = node.inputs[0]
        if table is not None and x is not None:
            output = tied_product(node, x, table, found.outputs, found.inputs)
        else:
            matrix = _dequantized(graph, node, found, lambda array: np.ascontiguousarray(array.T), axis=0)
            output = insert(node, "MatMul", [x, matrix]).outputs[0]
        bias = node.inputs[5] if len(node.inputs) > 5 else None
        if bias is not None:
            output = insert(node, "Add", [output, bias]).outputs[0]
        _finish(graph, node, output)


def _finish(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    replace(node.outputs[0], output)
    remove_unused(graph, node)


def _blocks(node: ir.Node) -> _Blocks | str:
    gathers = node.op_type == "GatherBlockQuantized"
    names = (0, 2, 3) if gathers else (1, 2, 3)
    values = [node.inputs[index] if len(node.inputs) > index else None for index in names]
    if not gathers and len(node.inputs) > 4 and node.inputs[4] is not None:
        return "it reorders its inputs by group"
    producer = values[0].producer() if values[0] is not None else None
    if producer is not None and producer.op_type == "Reshape":
        values[0] = producer.inputs[0]
    packed, scales, points = (weight(value) for value in values)
    if packed is None or scales is None or (values[2] is not None and points is None):
        return "its weight is computed"
    bits, block_size = int_attribute(node, "bits", 4), int_attribute(node, "block_size", 128)
    if bits not in (4, 8) or packed.dtype != ir.DataType.UINT8:
        return f"its weight of {bits} bits, stored as {packed.dtype.name}, has no standard form"
    outputs = shape_of(packed)[0]
    inputs = packed.size * 8 // (bits * outputs)
    if int_attribute(node, "K", inputs) != inputs:
        return "its last block is not full"
    if gathers and (int_attribute(node, "gather_axis", 0) or int_attribute(node, "quantize_axis", 1) == 0):
        return "it gathers along its blocks"
    if points is not None and points.dtype != ir.DataType.UINT8:
        return "its zero points are no whole numbers"
    stem = str(values[0] and values[0].name)
    return _Blocks(stem, packed, scales, points, outputs, inputs, bits, block_size)


def _dequantized(
    graph: ir.Graph, before: ir.Node, found: _Blocks, order: Callable[[Array], Array], axis: int
) -> ir.Value:
    """Return the weight as a value: [N, K] with its blocks along ``axis`` 1, or [K, N] along 0."""
    shape = (found.outputs, found.inputs)
    blocks = (found.outputs, found.inputs // found.block_size)
    if axis == 0:
        shape, blocks = shape[::-1], blocks[::-1]

    def stored(content: Array) -> Array:
        return pack_nibbles(content).reshape(-1) if found.bits == 4 else content.view(found.dtype.numpy())

    values = lazy(lambda: stored(order(found.values())), found.dtype, shape)
    rows = found.outputs
    scales = lazy(lambda: order(found.scales.numpy().reshape(rows, -1)), found.scales.dtype, blocks)
    operands = [
        add_initializer(graph, f"{found.stem}.values", values),
        add_initializer(graph, f"{found.stem}.scales", scales),
    ]
    if found.zero_points is not None:
        points = lazy(lambda: stored(order(found.points())), found.dtype, blocks)
        operands.append(add_initializer(graph, f"{found.stem}.zero_points", points))
    attributes = {"axis": axis, "block_size": found.block_size}
    made = insert(before, "DequantizeLinear", operands, attributes).outputs[0]
    made.shape, made.dtype = ir.Shape(shape), found.scales.dtype
    return made
