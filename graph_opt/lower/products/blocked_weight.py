"""Convert blocked int4 and int8 weights to the layout of onnxruntime's kernels.

B is [N, K / block, block * bits / 8] with the K axis innermost, unsigned with the implicit zero point
2^(bits - 1). Scales are [N, K / block]; zero points are packed per row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import add_initializer, int_attribute, weight
from ...graph.lazy import Array, lazy, pack_nibbles, packed_bytes, shape_of, unpack_nibbles

_BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}
_SIGNED = frozenset({ir.DataType.INT4, ir.DataType.INT8})
_TILE = 256


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A DequantizeLinear node of blocked weights, with the tensors it reads."""

    node: ir.Node
    values: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    axis: int
    block_size: int

    @property
    def stem(self) -> str:
        """Prefix of the names of new initializers."""
        return str(self.node.inputs[0] and self.node.inputs[0].name).removesuffix(".values")

    @property
    def bits(self) -> int:
        """Bits per value."""
        return _BITS[self.values.dtype]

    @property
    def inputs(self) -> int:
        """K, the size of the input axis."""
        return shape_of(self.values)[self.axis]

    @property
    def blocks(self) -> int:
        """Blocks per output; the last one may be partial."""
        return -(-self.inputs // self.block_size)

    @property
    def outputs(self) -> int:
        """N, the number of outputs."""
        return shape_of(self.values)[1 - self.axis]


def blocked_weight(value: ir.Value | None) -> BlockedWeight | str | None:
    """Return the blocked weight that computes ``value``, why it is not supported, or None if it is none."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.domain:
        return None
    block_size = int_attribute(node, "block_size", 0)
    tensors = [weight(operand) for operand in node.inputs]
    values, scales = tensors[0], tensors[1]
    if values is None or scales is None or not block_size or len(values.shape) != 2:
        return None
    if values.dtype not in _BITS:
        return f"weights of type {values.dtype.name} have no kernel"
    if len(tensors) > 2 and node.inputs[2] is not None and tensors[2] is None:
        return "the zero points are not constant"
    zero_points = tensors[2] if len(tensors) > 2 else None
    if values.dtype not in _SIGNED and zero_points is None:
        zero_points = _zeros(values.dtype, shape_of(scales))  # the kernels' implicit one is the middle
    if values.dtype in _SIGNED and zero_points is not None:
        return "signed weights with zero points have no kernel"
    axis = int_attribute(node, "axis", 1)
    if shape_of(values)[axis % 2] % 2 and _BITS[values.dtype] == 4:
        return "4-bit weights with an odd number of inputs have no kernel"
    return BlockedWeight(node, values, scales, zero_points, axis % 2, block_size)


def packed_operands(graph: ir.Graph, blocked: BlockedWeight) -> list[ir.Value]:
    """Register B, scales and, if any, zero points of a weight in kernel layout."""
    names = ("packed", "packed_scales", "packed_zero_points")
    parts = zip(names, packed_tensors(blocked), strict=False)
    return [add_initializer(graph, f"{blocked.stem}.{name}", tensor) for name, tensor in parts]


def packed_tensors(blocked: BlockedWeight) -> list[ir.LazyTensor]:
    """Return B, scales and, if any, zero points of a weight in kernel layout."""
    blocks, bits = blocked.blocks, blocked.bits
    shape = (blocked.outputs, blocks, blocked.block_size * bits // 8)
    packed = lazy(lambda: _whole_blocks(blocked), ir.DataType.UINT8, shape)
    scales = lazy(
        lambda: _outputs_first(blocked.scales.numpy(), blocked.axis), blocked.scales.dtype, shape[:2]
    )
    offsets = blocked.zero_points
    if offsets is None:
        return [packed, scales]
    row = (blocks * bits + 7) // 8
    points = lazy(lambda: _zero_point_rows(offsets, blocked.axis), ir.DataType.UINT8, (blocked.outputs, row))
    return [packed, scales, points]


def middle_zero_points(graph: ir.Graph, blocked: BlockedWeight) -> ir.Value:
    """Register the implicit zero points explicitly: the middle of the unsigned range."""
    shape = (blocked.outputs, (blocked.blocks * blocked.bits + 7) // 8)
    middle = np.uint8(0x88 if blocked.bits == 4 else 0x80)
    points = lazy(lambda: np.full(shape, middle), ir.DataType.UINT8, shape)
    return add_initializer(graph, f"{blocked.stem}.middle_zero_points", points)


def _zeros(dtype: ir.DataType, shape: tuple[int, ...]) -> ir.LazyTensor:
    """Return zero points of 0, which unsigned weights without zero points have."""

    def compute() -> Array:
        zeros = np.zeros(shape, np.uint8)
        return pack_nibbles(zeros) if _BITS[dtype] == 4 else zeros

    return lazy(compute, dtype, shape)


def _whole_blocks(found: BlockedWeight) -> Array:
    """Return the rows of a weight, the last block of each padded with zeros, which kernels do not read."""
    rows = _rows(found.values, found.axis).reshape(found.outputs, -1)
    missing = found.blocks * found.block_size * found.bits // 8 - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing))) if missing else rows


def _outputs_first(array: Array, axis: int) -> Array:
    return np.ascontiguousarray(array.T) if axis == 0 else array


def _rows(values: ir.TensorProtocol, axis: int) -> Array:
    """Return a weight's unsigned bytes, one output per row, the K axis packed along the row."""
    size, other = shape_of(values)
    if _BITS[values.dtype] == 8:
        unsigned = values.numpy().view(np.uint8) ^ np.uint8(0x80 if values.dtype in _SIGNED else 0)
        return _outputs_first(unsigned, axis)
    packed = packed_bytes(values)
    if axis == 0 and other % 2:
        packed = pack_nibbles(np.ascontiguousarray(unpack_nibbles(packed, (size, other)).T))
    elif axis == 0:
        packed = _transpose_nibbles(packed.reshape(size, -1))
    return packed ^ np.uint8(0x88) if values.dtype in _SIGNED else packed


def _transpose_nibbles(packed: Array) -> Array:
    """Transpose a matrix of nibbles packed along its rows, tile by tile; both sizes must be even."""
    even, odd = packed[0::2], packed[1::2]
    result = np.empty((2 * packed.shape[1], len(even)), np.uint8)
    for start in range(0, packed.shape[1], _TILE):
        columns = slice(start, start + _TILE)
        low, high = even[:, columns], odd[:, columns]
        rows = result[2 * start : 2 * (start + low.shape[1])]
        rows[0::2] = ((low & 0x0F) | (high << 4)).T
        rows[1::2] = ((low >> 4) | (high & 0xF0)).T
    return result


def _zero_point_rows(offsets: ir.TensorProtocol, axis: int) -> Array:
    """Return zero points packed per output, each row padded to whole bytes."""
    if _BITS[offsets.dtype] == 8:
        return _outputs_first(offsets.numpy(), axis)
    rows = _outputs_first(unpack_nibbles(packed_bytes(offsets), shape_of(offsets)), axis)
    return pack_nibbles(np.pad(rows, ((0, 0), (0, rows.shape[1] % 2))))
