"""Find candidates of rotary embeddings: sums of products with tables of cos and sin."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import sole_consumer

_STEPS = 8


@dataclass(frozen=True, slots=True)
class RotaryMatch:
    """A candidate: ``output`` is ``x`` rotated by ``cos`` and ``sin``.

    The tables are [batch, 1, sequence, width], where width is the number of rotated columns of x, or half of
    it if ``halved``. With the heads of x on axis 2, they are [batch, sequence, 1, width].
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    output: ir.Value
    halved: bool = False
    heads_axis: int = 1


def rotation(node: ir.Node) -> RotaryMatch | None:
    """Return the candidate rotation whose result is this sum."""
    products = [value.producer() if value is not None else None for value in node.inputs]
    if any(product is None or product.op_type != "Mul" or product.domain for product in products):
        return None
    pairs = [[value for value in product.inputs if value is not None] for product in products if product]
    for straight, turned in (pairs, pairs[::-1]):
        for x, cos in (straight, straight[::-1]):
            for rotated, sin in (turned, turned[::-1]):
                axis = _heads_axis(cos, x)
                if axis and rotated is not x and _heads_axis(sin, x) == axis and _reaches(rotated, x):
                    return RotaryMatch(x, cos, sin, node.outputs[0], heads_axis=axis)
    return None


def rotation_of_parts(node: ir.Node) -> RotaryMatch | None:
    """Return the candidate whose result joins x1 * cos - x2 * sin and x2 * cos + x1 * sin, of parts of x."""
    made = [value.producer() if value is not None else None for value in node.inputs]
    if [part.op_type if part is not None and not part.domain else "" for part in made] != ["Sub", "Add"]:
        return None
    products = [value.producer() for part in made if part is not None for value in part.inputs if value]
    pairs = [list(one.inputs) for one in products if one is not None and one.op_type == "Mul"]
    if len(pairs) != len(products):
        return None
    for x1, cos in (pairs[0], pairs[0][::-1]):
        for x2, sin in (pairs[1], pairs[1][::-1]):
            if x1 is None or x2 is None or cos is None or sin is None:
                continue
            x, axis = _part_of(x1), _heads_axis(cos, x1)
            if axis and x is not None and x is _part_of(x2) and _heads_axis(sin, x2) == axis:
                return RotaryMatch(x, cos, sin, node.outputs[0], halved=True, heads_axis=axis)
    return None


def _heads_axis(table: ir.Value, x: ir.Value) -> int | None:
    """Return the axis of x, 1 or 2, on which a table of the same shape has one element."""
    if table.shape is None or x.shape is None or len(table.shape) != 4 or len(x.shape) != 4 or table is x:
        return None
    for axis, sequence in ((1, 2), (2, 1)):
        same = all(table.shape[other] == x.shape[other] for other in (sequence, 3))
        if table.shape[axis] == 1 != x.shape[axis] and same:
            return axis
    return None


def _reaches(value: ir.Value, x: ir.Value) -> bool:
    stack = [(value, 0)]
    while stack:
        current, depth = stack.pop()
        if current is x or _part_of(current) is x:
            return True
        node = current.producer()
        if node is not None and depth < _STEPS:
            stack.extend((operand, depth + 1) for operand in node.inputs if operand is not None)
    return False


def _part_of(value: ir.Value) -> ir.Value | None:
    """Return the value of which ``value`` is a slice, else None."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type in ("Slice", "Split") else None


def with_unrotated_part(match: RotaryMatch) -> RotaryMatch:
    """Extend a rotation by the part of each head that is not rotated, if there is one."""
    whole = _part_of(match.x)
    reader = sole_consumer(match.output)
    if (
        whole is None
        or reader is None
        or reader.op_type != "Concat"
        or reader.outputs[0].shape != whole.shape
    ):
        return match
    return replace(match, x=whole, output=reader.outputs[0])
