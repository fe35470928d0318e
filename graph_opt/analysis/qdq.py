"""The parameters of QuantizeLinear and DequantizeLinear, and how moving a node changes their axis."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import constant, int_attribute

_DIGITS = {ir.DataType.FLOAT: 24, ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}
_BYTES = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
_INTEGERS = _BYTES | {ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16, ir.DataType.UINT16}
_WHOLE_BYTES = frozenset(dtype for dtype in _INTEGERS if dtype.bitwidth >= 8)
RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
JOINS_PAIRS = "onnxruntime would merge the pairs before and behind it, whose parameters differ"
ROUNDS_PRODUCT = "onnxruntime would round the floats that its quantized weight multiplies"
MOVERS = RESHAPES | {"Transpose", "Slice", "Gather", "Concat", "Split", "MaxPool"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The quantization parameters of a node.

    Attributes:
        scale: a scalar, or one scale per index of ``axis``.
        zero_point: a value of the quantized type; None means 0.
        axis: the axis of per-axis scales, None for a scalar scale.
        dtype: the quantized type, None if unknown.
    """

    scale: ir.Value
    zero_point: ir.Value | None
    axis: int | None
    dtype: ir.DataType | None

    def equals(self, other: Parameters) -> bool:
        """Return whether both are known to define the same mapping."""
        if self.dtype is None or (self.dtype, self.axis) != (other.dtype, other.axis):
            return False
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return all(a is b or _same_content(a, b) for a, b in pairs)

    def loses_digits(self) -> str | None:
        """Return why QuantizeLinear(DequantizeLinear(x)) may differ from x, None if it never does.

        The product x * scale and the division by scale have a relative error of half a unit in the last place
        each; their sum must stay below half a quantization step.
        """
        scale, kind = constant(self.scale), _type_of(self.scale)
        digits = None if kind is None else _DIGITS.get(kind)
        if scale is None or digits is None:
            return "its scale is not a constant float"
        if self.dtype not in _INTEGERS or self.dtype is None:
            return "it does not quantize to an integer type of 4 to 16 bits"
        bits = self.dtype.bitwidth
        if bits + 2 >= digits:
            return f"{kind} has too few mantissa bits for {bits}-bit values"
        with np.errstate(over="ignore"):
            largest = scale * scale.dtype.type(2**bits)
        return (
            None if (scale > 0).all() and np.isfinite(largest).all() else "its scale is not a usable number"
        )


def parameters(node: ir.Node) -> Parameters | str:
    """Return the parameters of a QuantizeLinear or DequantizeLinear, or why they are unknown."""
    scale, zero_point = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    rank = _rank(scale)
    if scale is None or rank is None:
        return "the rank of its scale is unknown"
    if int_attribute(node, "block_size", 0):
        return "its scales are per block"
    if int_attribute(node, "precision", 0):
        return "its attribute precision is set"
    axis = int_attribute(node, "axis", 1)
    if axis < 0:
        axis += _rank(node.inputs[0]) or _rank(node.outputs[0]) or 0
    if rank and axis < 0:
        return "its axis is negative and its rank is unknown"
    return Parameters(scale, zero_point, axis if rank else None, _dtype(node, zero_point))


def joins_pairs(source: ir.Value, output: ir.Value) -> bool:
    """Return whether reading ``source`` instead of ``output`` puts two unequal pairs in a row.

    onnxruntime's default optimizations replace Q DQ Q DQ by one pair, even if the parameters differ
    (DoubleQDQPairsRemover): results move by up to a step of the coarser pair. Transposes between the pairs
    count for nothing, because those optimizations may cancel them before.
    """
    maker = _maker(source)
    before = _maker(None if maker is None or not maker.inputs else maker.inputs[0])
    for reader in _readers(output):
        if _is(maker, _DEQUANTIZE) and _is(reader, _QUANTIZE):
            if _is(before, _QUANTIZE) and _differ(maker, reader):
                return True
        elif _is(maker, _QUANTIZE) and _is(reader, _DEQUANTIZE):
            behind = _readers(reader.outputs[0])
            if (_is(before, _DEQUANTIZE) and _differ(before, maker)) or any(
                _is(node, _QUANTIZE) and _differ(reader, node) for node in behind
            ):
                return True
    return False


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Return the node that makes a value, or what Transposes rearrange to it."""
    node = None if value is None else value.producer()
    while _is(node, "Transpose"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def _readers(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that read a value, or what Transposes rearrange it to."""
    readers, pending = list[ir.Node](), [value]
    while pending:
        for node in pending.pop().consumers():
            if _is(node, "Transpose"):
                pending.append(node.outputs[0])
            else:
                readers.append(node)
    return readers


def rounds_product(source: ir.Value | None, output: ir.Value) -> bool:
    """Return whether reading ``source`` instead of ``output`` makes a dequantized weight a product's operand.

    onnxruntime fuses DequantizeLinear of a stored weight with the MatMul behind it, and rounds its
    activations to 8 bits by default (MatMulNBits: 0.5 % of the largest result). Behind another node, the
    product is exact. Activations that are quantized themselves are not rounded.
    """
    maker = None if source is None else source.producer()
    if not _is(maker, _DEQUANTIZE) or maker.inputs[0] is None:
        return False
    if ir.convenience.get_const_tensor(maker.inputs[0]) is None:
        return False
    products = [use.node for use in output.uses() if use.node.op_type == "MatMul" and use.idx == 1]
    others = [None if product.inputs[0] is None else product.inputs[0].producer() for product in products]
    return any(not _is(other, _DEQUANTIZE) for other in others)


def _is(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    return node is not None and node.op_type == op_type and not node.domain


def _differ(before: ir.Node, after: ir.Node) -> bool:
    """Return whether two nodes are not known to have equal parameters."""
    first, second = parameters(before), parameters(after)
    return isinstance(first, str) or isinstance(second, str) or not first.equals(second)


def _rank(value: ir.Value | None) -> int | None:
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    shape = value.shape if tensor is None else tensor.shape
    return None if shape is None else len(shape)


def _type_of(value: ir.Value) -> ir.DataType | None:
    tensor = ir.convenience.get_const_tensor(value)
    return value.dtype if tensor is None else tensor.dtype


def _dtype(node: ir.Node, zero_point: ir.Value | None) -> ir.DataType | None:
    if zero_point is not None:
        return _type_of(zero_point)
    if node.op_type == "DequantizeLinear":
        return None if node.inputs[0] is None else _type_of(node.inputs[0])
    return ir.DataType(int_attribute(node, "output_dtype", 0) or ir.DataType.UINT8)


def _same_content(a: ir.Value | None, b: ir.Value | None) -> bool:
    left, right = (None if value is None else constant(value) for value in (a, b))
    if left is None or right is None:  # a missing zero point is 0
        given = right if a is None else left if b is None else None
        return given is not None and not np.any(np.asarray(given).astype(np.int64))
    return _identity(left) == _identity(right)


def _identity(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()


def cannot_move(node: ir.Node, quantization: Parameters) -> str | None:
    """Return why an operator of ``MOVERS`` does not commute with quantization, None if it does."""
    if node.op_type in RESHAPES or node.op_type == "Transpose":
        return None
    if node.op_type == "MaxPool":
        scale = constant(quantization.scale)
        if scale is None or not (scale > 0).all():
            return "MaxPool needs positive scales"
        if len(node.outputs) > 1 and node.outputs[1].uses():
            return "the indices that MaxPool returns are used"
        return None if quantization.dtype in _BYTES else "MaxPool supports 8-bit integers only"
    return None if quantization.dtype in _WHOLE_BYTES else f"{node.op_type} does not support this type"


def moved_axis(node: ir.Node, axis: int, *, backward: bool = False) -> int | None:
    """Return the axis of the result that an axis of the operand becomes, None if there is none.

    Args:
        node: a node of an operator in ``MOVERS``.
        axis: axis of the operand, not negative; of the result if ``backward``.
        backward: return the operand's axis of the result's ``axis`` instead.
    """
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return None
    before, after = list(source.shape), list(result.shape)
    if node.op_type in RESHAPES:
        return _aligned(after, before, axis) if backward else _aligned(before, after, axis)
    if node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        order = list(perm.as_ints()) if perm is not None else list(reversed(range(len(before))))
        return order[axis] if backward else order.index(axis)
    if node.op_type == "Gather":
        first, more = int_attribute(node, "axis", 0) % len(before), len(after) - len(before)
        if axis < first:
            return axis
        behind = axis > first + more if backward else axis > first
        return (axis - more if backward else axis + more) if behind else None
    return None if axis in _touched(node, len(before)) else axis


def _aligned(before: list[Any], after: list[Any], axis: int) -> int | None:
    """Return the axis of ``after`` up to which, or from which on, all sizes equal those of ``before``."""
    rest = len(before) - axis
    if _certainly_equal(before[: axis + 1], after[: axis + 1]):
        return axis
    return len(after) - rest if _certainly_equal(before[-rest:], after[-rest:]) else None


def _certainly_equal(a: list[Any], b: list[Any]) -> bool:
    return a == b and not any(size == 0 or getattr(size, "value", "") is None for size in a)


def _touched(node: ir.Node, rank: int) -> set[int]:
    """Return the axes along which a node selects, joins or compares elements; all if unknown."""
    if node.op_type == "MaxPool":
        return set(range(2, rank))
    if node.op_type in ("Concat", "Split"):
        return {int_attribute(node, "axis", 0) % rank}
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else np.arange(rank)
    return set(range(rank)) if axes is None else {int(axis) % rank for axis in axes.reshape(-1)}
