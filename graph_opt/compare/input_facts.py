"""Derive facts about inputs from a graph: bounds of indices, compared values, recurrent states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ...contract import PAST, PRESENT
from ..graph.edit import constant, int_attribute, static_size

# Operators whose result has the values of their first input, in another shape or type.
_PASSING = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
_LOOKUPS = frozenset({"Gather", "GatherElements", "GatherBlockQuantized"})
_MASK = re.compile(r"(^|[_./])mask$|attention_mask|padding_mask")
_SEGMENTS = re.compile(r"token_type|segment")
_POSITIONS = re.compile(r"position_ids|positions?$")
_LENGTHS = re.compile(r"(^|[_./])(len|lens|length|lengths)$|_lengths?$|_lens?$")
_RATE = re.compile(r"^(sr|sample_rate|sampling_rate)$")


@dataclass(frozen=True, slots=True)
class InputFacts:
    """Facts about an input.

    Attributes:
        value: the input.
        role: ``mask``, ``segments``, ``positions``, ``lengths``, ``rate``, ``state``, ``image`` or "".
        bound: exclusive upper bound of indices: the size of the table that they index.
        choices: constants that the input is compared with.
        fed_by: the output that holds the next value of this state.
        preferred: values to use in some runs.
    """

    value: ir.Value
    role: str = ""
    bound: int | None = None
    choices: tuple[int, ...] = ()
    fed_by: str | None = None
    preferred: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The input's name."""
        return str(self.value.name)


def input_facts(graph: ir.Graph) -> list[InputFacts]:
    """Return the facts about each input without a default value."""
    return [_facts(graph, value) for value in graph.inputs if not value.is_initializer()]


def _facts(graph: ir.Graph, value: ir.Value) -> InputFacts:
    bounds: list[int] = []
    choices: set[int] = set()
    if value.dtype is not None and value.dtype.is_integer():
        for handed, index, node in readers(value):
            bounds += _bound(node, index)
            choices |= _compared_with(node, handed)
    fed_by = _next_state(graph, value)
    role = "state" if fed_by is not None else _role(value)
    return InputFacts(value, role, min(bounds, default=None), tuple(sorted(choices)), fed_by)


def readers(value: ir.Value) -> Iterator[tuple[ir.Value, int, ir.Node]]:
    """Yield what reads the values of an input, through operators that only hand them on."""
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        for use in current.uses():
            yield current, use.idx, use.node
            if use.node.op_type in _PASSING and use.idx == 0:
                new = [output for output in use.node.outputs if output not in seen]
                seen.update(new)
                waiting += new


def table_readers(value: ir.Value) -> list[ir.Value]:
    """Return the tables whose rows are gathered by an input along axis 0."""
    found = (
        node.inputs[0]
        for _, index, node in readers(value)
        if node.op_type == "Gather" and index == 1 and not int_attribute(node, "axis", 0)
    )
    return [table for table in dict.fromkeys(found) if table is not None]


def _bound(node: ir.Node, index: int) -> list[int]:
    if node.op_type in _LOOKUPS and index == 1:
        size = _table_size(node.inputs[0], int_attribute(node, "axis", 0))
        return [] if size is None else [size]
    if node.op_type == "OneHot" and index == 0:
        depth = constant(node.inputs[1])
        return [] if depth is None else [int(depth.reshape(-1)[0])]
    return []


def _table_size(table: ir.Value | None, axis: int) -> int | None:
    if table is None:
        return None
    if table.const_value is not None:
        return int(table.const_value.shape.numpy()[axis])
    size = static_size(table, axis)
    node = table.producer()
    if size is None and node is not None and node.op_type in {"DequantizeLinear", "Cast", "Identity"}:
        return _table_size(node.inputs[0], axis)
    return size


def _compared_with(node: ir.Node, value: ir.Value) -> set[int]:
    if node.op_type != "Equal":
        return set()
    others = [constant(other) for other in node.inputs if other is not value]
    return {int(other.reshape(-1)[0]) for other in others if other is not None and other.size == 1}


def _role(value: ir.Value) -> str:
    name = str(value.name).lower()
    rank = len(value.shape) if value.shape is not None else 0
    integer = value.dtype is not None and (value.dtype.is_integer() or value.dtype == ir.DataType.BOOL)
    if _MASK.search(name) and rank >= 2:
        return "mask"
    if integer:
        named = (("segments", _SEGMENTS), ("positions", _POSITIONS), ("rate", _RATE), ("lengths", _LENGTHS))
        return next((role for role, pattern in named if pattern.search(name)), "")
    return "image" if rank == 4 and static_size(value, 1) in (1, 3, 4) else ""


def _next_state(graph: ir.Graph, value: ir.Value) -> str | None:
    """Return the output with a matching name, type and shape, such as ``stateN`` for ``state``, else None."""
    if value.dtype is None or not value.dtype.is_floating_point() or value.shape is None:
        return None
    name = str(value.name)
    wanted = {name.replace(PAST, PRESENT), name.replace("past", PRESENT)} - {name}
    fitting = [one for one in graph.outputs if one.dtype in (None, value.dtype) and _fits(one, value)]
    named = [str(one.name) for one in fitting if one.name in wanted]
    named += [
        str(one.name)
        for one in fitting
        if re.fullmatch(re.escape(name) + r"_?(n|N|out|new|next)", str(one.name))
    ]
    return named[0] if named else None


def _fits(output: ir.Value, value: ir.Value) -> bool:
    if output.shape is None or value.shape is None or len(output.shape) != len(value.shape):
        return False
    pairs = zip(output.shape, value.shape, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
