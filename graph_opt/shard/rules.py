"""How each operator passes a cut: from its output to its inputs, and from an input to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import constant, int_attribute
from .cuts import Cut, even_cut, grouped, reshaped

# Each element of the result needs only the elements of the operands at its place.
ELEMENTWISE = frozenset(
    {
        *(
            "Abs",
            "Add",
            "And",
            "Cast",
            "Clip",
            "Div",
            "Elu",
            "Equal",
            "Erf",
            "Exp",
            "Gelu",
            "Identity",
            "Log",
        ),
        *(
            "Max",
            "Mean",
            "Min",
            "Mul",
            "Neg",
            "Not",
            "Or",
            "Pow",
            "Reciprocal",
            "Relu",
            "Sigmoid",
            "Softplus",
        ),
        *("Sqrt", "Sub", "Swish", "Tanh", "Where", "QuantizeLinear"),
    }
)
_RESHAPES = frozenset({"Reshape", "Unsqueeze", "Squeeze"})
NORMS = frozenset({"RMSNormalization", "LayerNormalization"})
Sizes = list[int | None]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What rules know of values.

    Args:
        of: returns the sizes of a value's axes, None for those that are not constant; None if unknown.
        count: number of ranks.
    """

    of: Callable[[ir.Value | None], Sizes | None]
    count: int


def inputs_of(node: ir.Node, cut: Cut, shapes: Shapes) -> list[Cut | None] | None:
    """Return the cuts of all inputs that give the first output cut as ``cut``; None if there are none.

    Inputs with None are needed whole.
    """
    whole: list[Cut | None] = [None] * len(node.inputs)
    if node.op_type in ELEMENTWISE:
        return [cut if _spans(value, cut, shapes) else None for value in node.inputs]
    if node.op_type in NORMS:
        axis = int_attribute(node, "axis", -1)
        after = shapes.of(node.inputs[0])
        if axis >= 0:
            axis = axis - len(after) if after is not None else -(1 << 30)
        if cut.axis >= axis:
            return None
        return [cut, *(cut if _spans(value, cut, shapes) else None for value in node.inputs[1:])]
    if _keeps_axis(node, cut, shapes):
        return [cut, *whole[1:]]
    if node.op_type == "MatMul" and cut.axis == -1:
        return [None, cut]
    first = _first_input(node, cut, shapes)
    if first is None:
        return None
    if node.op_type == "Concat":
        return [*_concatenated(node, cut, shapes)] if not _beside(node, cut, shapes) else [cut] * len(whole)
    if node.op_type == "MatMul":
        return [cut if _spans(value, cut, shapes) else None for value in node.inputs]
    return [first, *whole[1:]]


def output_of(node: ir.Node, index: int, cut: Cut, shapes: Shapes) -> Cut | None:
    """Return the cut of the first output if input ``index`` is cut; None if no cut of the output is known."""
    if node.op_type in ELEMENTWISE or (node.op_type in NORMS and cut.axis < -1):
        return cut
    if node.op_type == "MatMul":
        return cut if cut.axis < -2 or (index and cut.axis == -1) else None
    if index:
        return cut if node.op_type == "Concat" and _beside(node, cut, shapes) else None
    if _keeps_axis(node, cut, shapes):
        return cut
    before, after = shapes.of(node.inputs[0]), shapes.of(node.outputs[0])
    if node.op_type in _RESHAPES:
        return None if before is None or after is None else _reshaped(node, cut, before, after)
    if node.op_type == "Transpose" and (order := _order(node)) is not None:
        return cut.moved(order.index(len(order) + cut.axis) - len(order))
    return cut if _beside(node, cut, shapes) else None


def split_input(node: ir.Node, cuts: Sequence[Cut | None], shapes: Shapes) -> Cut | None:
    """Return the cut of the input of a Split whose outputs are cut; None if there is none."""
    axis, sizes = _axis(node, shapes), _split_sizes(node, shapes)
    known = [cut for cut in cuts if cut is not None]
    if len(known) < len(cuts):
        return None
    if len(set(known)) == 1 and known[0].axis != axis:
        return known[0]
    if sizes is None or any(cut.axis != axis for cut in known):
        return None
    offsets = np.cumsum([0, *sizes[:-1]])
    parts = []
    for rank in range(shapes.count):
        runs = [
            (start + int(offset), stop + int(offset))
            for cut, offset in zip(known, offsets, strict=True)
            for start, stop in cut.parts[rank]
        ]
        parts.append(tuple(runs))
    return None if axis is None else Cut(axis, sum(sizes), tuple(parts))


def target_sizes(node: ir.Node) -> Sizes | None:
    """Return the target of a Reshape or Expand, None for elements that are no constants; None if unknown."""
    target = constant(node.inputs[1])
    if target is not None:
        return [int(size) for size in target.reshape(-1)]
    joined = node.inputs[1].producer() if node.inputs[1] is not None else None
    if joined is None or joined.op_type != "Concat":
        return None
    sizes: Sizes = []
    for value in joined.inputs:
        part, source = constant(value), value.producer() if value is not None else None
        if part is not None:
            sizes += [int(size) for size in part.reshape(-1)]
        elif source is not None and source.op_type == "Shape" and source.inputs[0] is not None:
            rank = len(source.inputs[0].shape or ())
            start, end = int_attribute(source, "start", 0), int_attribute(source, "end", rank)
            if not rank:
                return None
            sizes += [None] * len(range(rank)[start:end])
        else:
            return None
    return sizes


def heads_cut(axis: int, heads: int, count: int, groups: int | None = None) -> Cut | None:
    """Return the cut of heads into ranks; None if they do not divide.

    Args:
        axis: counted from the end.
        heads: number of heads.
        count: number of ranks.
        groups: number of heads of keys and values, of which each rank holds those that its heads read.
    """
    if heads % count:
        return None
    if groups is None or groups % count == 0:
        return even_cut(axis, heads if groups is None else groups, count)
    if count % groups:
        return None
    return Cut(
        axis, groups, tuple(((rank * groups // count, rank * groups // count + 1),) for rank in range(count))
    )


def gathered_input(node: ir.Node, cut: Cut, shapes: Shapes) -> Cut | None:
    """Return the cut of the data of a Gather with constant indices on the axis that is cut."""
    indices, before = constant(node.inputs[1]), shapes.of(node.inputs[0])
    if indices is None or indices.ndim != 1 or before is None or cut.axis != _axis(node, shapes):
        return None
    size = before[cut.axis]
    return None if size is None else cut.mapped(lambda part: np.unique(indices[part]), cut.axis, size)


def _sizes_axis(node: ir.Node, cut: Cut) -> bool:
    """Whether the size of an axis of the result is a constant, which can be changed."""
    if node.op_type != "Reshape":
        return constant(node.inputs[1]) is not None
    sizes = target_sizes(node)
    return sizes is not None and len(sizes) >= -cut.axis and sizes[cut.axis] is not None


def _reshaped(node: ir.Node, cut: Cut, before: Sizes, after: Sizes) -> Cut | None:
    """Return the cut behind a reshape, or before it if ``before`` is its result."""
    if node.op_type == "Reshape":
        return reshaped(cut, before, after)
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        return None
    rank = max(len(before), len(after))
    ones = {int(axis) % rank for axis in axes.reshape(-1)}
    longer = [axis - rank for axis in range(rank) if axis not in ones]  # of each axis of the shorter shape
    shorter = len(longer)
    if len(before) == shorter:
        return cut.moved(longer[shorter + cut.axis])
    return cut.moved(longer.index(cut.axis) - shorter) if cut.axis in longer else None


def _spans(value: ir.Value | None, cut: Cut, shapes: Shapes) -> bool:
    """Whether an operand has the axis of the cut, and is not broadcast along it."""
    sizes = shapes.of(value)
    if sizes is None:
        return value is not None
    return len(sizes) >= -cut.axis and sizes[cut.axis] != 1


def _first_input(node: ir.Node, cut: Cut, shapes: Shapes) -> Cut | None:
    """Return the cut of the first input of an operator that moves elements; None if there is none."""
    before, after = shapes.of(node.inputs[0]), shapes.of(node.outputs[0])
    if node.op_type in _RESHAPES:
        if before is None or after is None or not _sizes_axis(node, cut):
            return None
        return _reshaped(node, cut, after, before)
    if node.op_type == "Transpose" and (order := _order(node)) is not None:
        return cut.moved(order[len(order) + cut.axis] - len(order))
    if node.op_type == "RotaryEmbedding":
        heads = int_attribute(node, "num_heads", 0)
        if not heads:
            return cut if cut.axis == -3 else None
        alone = cut.axis == -1 and cut.size % heads == 0 and grouped(cut, -1, cut.size // heads) is not None
        return cut if alone else None
    if node.op_type == "Expand":
        known = before is not None and constant(node.inputs[1]) is not None
        return cut if known and _spans(node.inputs[0], cut, shapes) else None
    if node.op_type == "Gather" and cut.axis == _axis(node, shapes):
        return gathered_input(node, cut, shapes)
    if _beside(node, cut, shapes):
        return cut
    if node.op_type == "Concat" and cut.axis == _axis(node, shapes):
        parts = _concatenated(node, cut, shapes)
        return parts[0] if parts else None
    return cut if node.op_type == "MatMul" and cut.axis < -2 else None


def _concatenated(node: ir.Node, cut: Cut, shapes: Shapes) -> list[Cut]:
    """Return the cuts of the inputs of a Concat along the axis that is cut; empty if there are none."""
    cuts, offset = [], 0
    for value in node.inputs:
        sizes = shapes.of(value)
        size = None if sizes is None else sizes[cut.axis]
        if size is None:
            return []
        part_cut = cut.mapped(
            lambda part, low=offset, high=offset + size: part[(part >= low) & (part < high)] - low,  # type: ignore[misc]
            cut.axis,
            size,
        )
        if part_cut is None:
            return []
        cuts.append(part_cut)
        offset += size
    ordered = all(runs == tuple(sorted(runs)) for runs in cut.parts)
    return cuts if ordered else []


def _axis(node: ir.Node, shapes: Shapes, default: int = 0) -> int | None:
    """Return the axis of an operator, counted from the end; None if it is unknown or there are several."""
    data = shapes.of(node.inputs[0])
    if data is None and node.op_type in ("Slice", "Concat", "Split"):
        data = shapes.of(node.outputs[0])
    axis = int_attribute(node, "axis", default)
    if node.op_type == "Slice":
        axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
        if axes is None or axes.size != 1:
            return None
        axis = int(axes.reshape(-1)[0])
    return axis if axis < 0 else (axis - len(data) if data else None)


def _keeps_axis(node: ir.Node, cut: Cut, shapes: Shapes) -> bool:
    """Whether an operator computes over other axes than that of the cut, and keeps all axes."""
    if node.op_type == "Softmax":
        return _axis(node, shapes, default=-1) not in (None, cut.axis)
    if not node.op_type.startswith("Reduce") or not int_attribute(node, "keepdims", 1):
        return False
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    rank = len(shapes.of(node.inputs[0]) or ())
    if axes is None or not axes.size or (not rank and (axes >= 0).any()):
        return False
    return cut.axis not in {int(axis) if axis < 0 else int(axis) - rank for axis in axes.reshape(-1)}


def _beside(node: ir.Node, cut: Cut, shapes: Shapes) -> bool:
    """Whether an operator that selects or joins along one axis leaves the axis of the cut alone."""
    axis = _axis(node, shapes)
    if node.op_type not in ("Slice", "Gather", "Concat", "Split") or axis is None or axis == cut.axis:
        return False
    if node.op_type != "Gather" or axis < cut.axis:
        return True
    indices = shapes.of(node.inputs[1])
    return indices is not None and len(indices) == 1  # else axes before it move


def _order(node: ir.Node) -> list[int] | None:
    perm = node.attributes.get("perm")
    return None if perm is None else list(perm.as_ints())


def _split_sizes(node: ir.Node, shapes: Shapes) -> list[int] | None:
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = constant(node.inputs[1])
        return None if sizes is None else [int(size) for size in sizes]
    before, axis = shapes.of(node.inputs[0]), _axis(node, shapes)
    size = None if before is None or axis is None else before[axis]
    count = len(node.outputs)
    return None if size is None or size % count else [size // count] * count
