"""Convert blocked weights in onnxruntime's kernel layout into a blocked DequantizeLinear.

The kernels store a weight as [N, K / block, bytes per block], unsigned, with zero points or with the implicit
zero point 2^(bits - 1). The canonical weight is [K, N]; that of an embedding, and of the head tied to it,
[N, K].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import add_initializer, insert
from ..graph.lazy import Array, lazy, pack_nibbles, packed_bytes, unpack_nibbles


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """The tensors of a weight of N outputs and K inputs in kernel layout.

    The last block may extend beyond K; its padding is ignored.
    """

    stem: str
    packed: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    outputs: int
    inputs: int
    bits: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Number of blocks per output; the last one may be partial."""
        return -(-self.inputs // self.block_size)

    @property
    def dtype(self) -> ir.DataType:
        """The type of the canonical weight: signed if the zero point is implicit."""
        if self.zero_points is None:
            return ir.DataType.INT4 if self.bits == 4 else ir.DataType.INT8
        return ir.DataType.UINT4 if self.bits == 4 else ir.DataType.UINT8

    def values(self) -> Array:
        """Return the weight [N, K] as uint8 bit patterns of ``dtype``, one value per element."""
        raw = packed_bytes(self.packed).reshape(self.outputs, -1)
        shape = (self.outputs, raw.shape[1] * 8 // self.bits)
        unsigned = unpack_nibbles(raw, shape) if self.bits == 4 else raw
        middle = np.uint8(1 << (self.bits - 1) if self.zero_points is None else 0)
        return unsigned[:, : self.inputs] ^ middle

    def points(self) -> Array:
        """Return the zero points [N, blocks] as uint8; in kernel layout each row is padded to whole bytes."""
        if self.zero_points is None:
            raise AssertionError("unreachable: called only if there are zero points")
        rows = self.zero_points.numpy().reshape(self.outputs, -1)
        if self.bits == 4:
            return unpack_nibbles(rows, (self.outputs, 2 * rows.shape[1]))[:, : self.blocks]
        return rows


def _unchanged(array: Array) -> Array:
    return array


def _transposed(array: Array) -> Array:
    return np.ascontiguousarray(array.T)


def dequantized(graph: ir.Graph, before: ir.Node, quantized: KernelBlocks, axis: int) -> ir.Value:
    """Insert a DequantizeLinear and return its output: [N, K] for ``axis`` 1, or [K, N] for ``axis`` 0."""
    order: Callable[[Array], Array] = _unchanged if axis else _transposed
    shape, blocks = (quantized.outputs, quantized.inputs), (quantized.outputs, quantized.blocks)
    if axis == 0:
        shape, blocks = shape[::-1], blocks[::-1]

    def stored(content: Array) -> Array:
        return (
            pack_nibbles(content).reshape(-1)
            if quantized.bits == 4
            else content.view(quantized.dtype.numpy())
        )

    values = lazy(lambda: stored(order(quantized.values())), quantized.dtype, shape)
    rows = quantized.outputs
    scales = lazy(lambda: order(quantized.scales.numpy().reshape(rows, -1)), quantized.scales.dtype, blocks)
    operands = [
        add_initializer(graph, f"{quantized.stem}.values", values),
        add_initializer(graph, f"{quantized.stem}.scales", scales),
    ]
    if quantized.zero_points is not None:
        points = lazy(lambda: stored(order(quantized.points())), quantized.dtype, blocks)
        operands.append(add_initializer(graph, f"{quantized.stem}.zero_points", points))
    attributes = {"axis": axis, "block_size": quantized.block_size}
    made = insert(before, "DequantizeLinear", operands, attributes).outputs[0]
    made.shape, made.dtype = ir.Shape(shape), quantized.scales.dtype
    return made
