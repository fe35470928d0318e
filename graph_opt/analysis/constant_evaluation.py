"""Constant evaluation of small tensors, such as shapes and scale factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..graph.edit import int_attribute

Array = npt.NDArray[Any]
MAX_CONTENT = 1024  # elements; larger tensors are not shapes or head indices
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))
_CASTS = frozenset((ir.DataType.BOOL, *_INTEGERS, *_FLOATS))


def is_known(node: ir.Node) -> bool:
    """Return whether ``content_of`` computes the operator of a node."""
    return not node.domain and (node.op_type in _COMPUTE or node.op_type in ("Shape", "Size"))


def content_of(
    node: ir.Node,
    operands: Sequence[Array | None],
    shapes: Sequence[tuple[int, ...]],
    limit: int = MAX_CONTENT,
) -> Array | None:
    """Compute the output of a node with one output.

    Args:
        node: the node.
        operands: content of each input, None if it is absent or unknown.
        shapes: shape of each input.
        limit: maximum number of elements of the result.

    Returns:
        The content; None if the operator is not supported, an operand is unknown, or the result is too
        large.
    """
    if node.op_type == "Shape":
        start, end = int_attribute(node, "start", 0), node.attributes.get("end")
        return np.array(shapes[0][start : end.as_int() if end is not None else None], np.int64)
    if node.op_type == "Size":
        return np.array(np.prod(shapes[0], dtype=np.int64))
    compute = _COMPUTE.get(node.op_type)
    given = [operand for operand in operands if operand is not None]
    if compute is None or len(given) != sum(value is not None for value in node.inputs):
        return None
    if node.op_type in ("Range", "ConstantOfShape", "Expand") and _result_size(node, given) > limit:
        return None
    try:
        with np.errstate(all="ignore"):
            result = np.asarray(compute(node, *operands))
    except (IndexError, ValueError):  # probe sizes, such as a long past, may exceed a small table
        return None
    return result if result.size <= limit else None


def _result_size(node: ir.Node, operands: Sequence[Array]) -> int:
    if node.op_type == "Range":
        start, limit, delta = (operand.item() for operand in operands)
        return max(0, int((limit - start) / delta)) if delta else 0
    return int(np.prod(np.abs(operands[-1]), dtype=np.int64))


def _binary(function: Callable[..., Any]) -> Callable[..., Array]:
    def compute(_: ir.Node, left: Array, right: Array) -> Array:
        return np.asarray(function(left, right), np.result_type(left, right))

    return compute


def _compare(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda _, left, right: np.asarray(function(left, right), np.bool_)


def _unary(function: Callable[..., Any]) -> Callable[..., Array]:
    return lambda _, x: np.asarray(function(x), x.dtype)


def _divide(left: Array, right: Array) -> Array:
    if left.dtype.kind not in "iu":
        return np.asarray(left / right)
    if not right.all():
        raise ValueError("integer division by zero")
    whole, rest = np.divmod(left, right)
    return np.asarray(whole + ((rest != 0) & ((left < 0) != (right < 0))))  # ONNX truncates towards zero


def _cast(node: ir.Node, x: Array) -> Array:
    kind = ir.DataType(node.attributes["to"].as_int())
    if kind not in _CASTS or ir.DataType.from_numpy(x.dtype) not in _CASTS:
        raise ValueError("numpy and ONNX cast these types differently")
    if kind.is_integer() and not _holds(kind, x):
        raise ValueError("the cast of a float outside of the integer's range is undefined in ONNX")
    return np.asarray(x.astype(kind.numpy()))


def _holds(kind: ir.DataType, x: Array) -> bool:
    """Return whether ``x`` holds integers, or floats within the range of the integer type ``kind``."""
    if x.dtype.kind in "iub":
        return True
    numbers = x.astype(np.float64)
    bounds = np.iinfo(kind.numpy())
    return bool(((numbers > bounds.min - 1.0) & (numbers < bounds.max)).all())


def _concat(node: ir.Node, *parts: Array) -> Array:
    return np.concatenate(parts, axis=int_attribute(node, "axis", 0))


def _gather(node: ir.Node, data: Array, indices: Array) -> Array:
    return np.take(data, indices, axis=int_attribute(node, "axis", 0))


def _unsqueeze(_: ir.Node, x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(axes.reshape(-1).tolist()))


def _squeeze(_: ir.Node, x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, None if axes is None else tuple(axes.reshape(-1).tolist()))


def _reshape(node: ir.Node, x: Array, shape: Array) -> Array:
    keep = not int_attribute(node, "allowzero", 0)
    sizes = [x.shape[i] if size == 0 and keep else size for i, size in enumerate(shape.tolist())]
    return np.asarray(x.reshape(sizes))


def _slice(
    _: ir.Node, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    chosen = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        if step < 0 and start < -x.shape[axis]:
            raise ValueError("ONNX's specification and its reference evaluator differ here")
        stop = None if step < 0 and end <= -x.shape[axis] - 1 else end
        cut[axis] = slice(start, stop, step)
    return x[tuple(cut)]


def _constant_of_shape(node: ir.Node, shape: Array) -> Array:
    value = node.attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
    return np.full(tuple(shape.tolist()), fill.reshape(-1)[0], fill.dtype)


def _transpose(node: ir.Node, x: Array) -> Array:
    if x.dtype not in (np.int32, np.int64):
        raise ValueError("it is a weight, not a shape; FoldTransposesPass folds those")
    perm = node.attributes.get("perm")
    return np.array(np.transpose(x, None if perm is None else perm.as_ints()))


def _reduce(function: Callable[..., Any]) -> Callable[..., Array]:
    def compute(node: ir.Node, x: Array, axes: Array | None = None) -> Array:
        if int_attribute(node, "noop_with_empty_axes", 0) and (axes is None or not axes.size):
            return x
        axis = None if axes is None or not axes.size else tuple(axes.tolist())
        keep = bool(int_attribute(node, "keepdims", 1))
        return np.asarray(function(x, axis=axis, keepdims=keep), x.dtype)

    return compute


def _non_zero(_: ir.Node, x: Array) -> Array:
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)


_COMPUTE: dict[str, Callable[..., Array]] = {
    "Add": _binary(np.add),
    "And": _binary(np.logical_and),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _binary(_divide),
    "Equal": _compare(np.equal),
    "Expand": lambda _, x, shape: x * np.ones(tuple(shape.tolist()), x.dtype),
    "Gather": _gather,
    "Greater": _compare(np.greater),
    "GreaterOrEqual": _compare(np.greater_equal),
    "Identity": lambda _, x: x,
    "Less": _compare(np.less),
    "LessOrEqual": _compare(np.less_equal),
    "Max": lambda _, *values: np.asarray(np.max(np.broadcast_arrays(*values), axis=0), values[0].dtype),
    "Min": lambda _, *values: np.asarray(np.min(np.broadcast_arrays(*values), axis=0), values[0].dtype),
    "Mul": _binary(np.multiply),
    "Neg": _unary(np.negative),
    "NonZero": _non_zero,
    "Not": _unary(np.logical_not),
    "Or": _binary(np.logical_or),
    "Pow": lambda _, x, y: np.asarray(np.power(x, y), x.dtype),
    "Range": lambda _, start, limit, delta: np.arange(start, limit, delta, dtype=start.dtype),
    "Reciprocal": _unary(np.reciprocal),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.multiply.reduce),
    "Reshape": _reshape,
    "Slice": _slice,
    "Sqrt": _unary(np.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(np.subtract),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": lambda _, condition, left, right: np.asarray(np.where(condition, left, right)),
}
