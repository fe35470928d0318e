"""Shape inference of the most frequent operators; ONNX's own inference is slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ..graph.edit import int_attribute

Shape = tuple[int, ...]
_SAME_TYPE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or"}
    | {
        "Neg",
        "Sqrt",
        "Reciprocal",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Sin",
        "Cos",
        "Exp",
        "Softmax",
        "Identity",
        "Not",
    }
    | {"MatMul", "Transpose", "Concat"}
)
_BOOLEAN = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


def shape_of_result(node: ir.Node, shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape of the output from the shapes of all inputs; None if the operator is not supported.

    Raises:
        ValueError: the shapes do not match each other.
    """
    infer = _RULES.get(node.op_type)
    return None if infer is None else infer(node, shapes)


def type_of_result(node: ir.Node, types: Sequence[int]) -> int:
    """Return the element type of the output of an operator that ``shape_of_result`` supports."""
    if node.op_type in _SAME_TYPE:
        return types[0]
    if node.op_type in _BOOLEAN:
        return int(ir.DataType.BOOL)
    return types[1] if node.op_type == "Where" else node.attributes["to"].as_int()


def _broadcast(_: ir.Node, shapes: Sequence[Shape]) -> Shape:
    return np.broadcast_shapes(*shapes)


def _same(_: ir.Node, shapes: Sequence[Shape]) -> Shape:
    return shapes[0]


def _transpose(node: ir.Node, shapes: Sequence[Shape]) -> Shape:
    perm = node.attributes.get("perm")
    order = range(len(shapes[0]))[::-1] if perm is None else perm.as_ints()
    return tuple(shapes[0][axis] for axis in order)


def _matmul(_: ir.Node, shapes: Sequence[Shape]) -> Shape | None:
    left, right = shapes
    if len(left) < 2 or len(right) < 2:
        return None
    return (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])


def _concat(node: ir.Node, shapes: Sequence[Shape]) -> Shape:
    axis = int_attribute(node, "axis", 0) % len(shapes[0])
    joined = list(shapes[0])
    joined[axis] = sum(shape[axis] for shape in shapes)
    return tuple(joined)


_RULES: dict[str, Callable[[ir.Node, Sequence[Shape]], Shape | None]] = {
    **dict.fromkeys(
        ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Where", *sorted(_BOOLEAN)], _broadcast
    ),
    **dict.fromkeys(
        ["Cast", "Neg", "Sqrt", "Reciprocal", "Sigmoid", "Tanh", "Erf", "Sin", "Cos", "Exp", "Softmax"], _same
    ),
    **dict.fromkeys(["Identity", "Not"], _same),
    "Transpose": _transpose,
    "MatMul": _matmul,
    "Concat": _concat,
}
