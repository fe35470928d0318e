"""Derive facts about inputs from a graph: bounds of indices, compared values, recurrent states."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from ...contract import PAST, PRESENT
from ...records import dataclass
from ..analysis.index_bounds import Axis, IndexBounds
from ..graph.edit import constant, int_attribute, static_size

# Operators whose result has the values of their first input, in another shape or type.
_PASSING = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
# Operators whose result has values of these inputs, and maybe others, none above their maximum.
_JOINING: Mapping[str, Collection[int]] = {
    "Clip": (0,),
    "Concat": range(1 << 31),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Max": range(1 << 31),
    "Min": range(1 << 31),
    "Split": (0,),
    "Where": (1, 2),
}
_NEUTRAL = frozenset({"Equal", "Shape", "Size"})  # say nothing about what an input means
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
        bound: exclusive upper bound of indices: the size of the tensor that they index.
        below: axes of inputs whose sizes are further bounds.
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
    below: tuple[Axis, ...] = ()

    @property
    def name(self) -> str:
        """The input's name."""
        return str(self.value.name)

    @property
    def is_index(self) -> bool:
        """Whether the input indexes another tensor."""
        return self.bound is not None or bool(self.below)

    def limit(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """Return the exclusive upper bound of indices for shapes of the inputs, None if there is none."""
        sizes = [shapes[name][axis] + more for name, axis, more in self.below]
        return min(sizes if self.bound is None else [*sizes, self.bound], default=None)


def input_facts(graph: ir.Graph) -> list[InputFacts]:
    """Return the facts about each input without a default value."""
    bounds = IndexBounds(graph)
    return [_facts(graph, value, bounds) for value in graph.inputs if not value.is_initializer()]


def _facts(graph: ir.Graph, value: ir.Value, bounds: IndexBounds) -> InputFacts:
    choices: set[int] = set()
    if value.dtype is not None and value.dtype.is_integer():
        for handed, _, node in readers(value):
            choices |= _compared_with(node, handed)
    known = _index_bounds(value, bounds)
    fed_by = _next_state(graph, value)
    return InputFacts(
        value,
        role="state" if fed_by is not None else _role(value),
        bound=min((size for size in known if isinstance(size, int)), default=None),
        choices=tuple(sorted(choices)),
        fed_by=fed_by,
        below=tuple(dict.fromkeys(size for size in known if not isinstance(size, int))),
    )


def _index_bounds(value: ir.Value, bounds: IndexBounds) -> list[int | Axis]:
    """Return the bounds of an input of integers, or of floats that are only used as indices."""
    if value.dtype is None or not (value.dtype.is_integer() or value.dtype.is_floating_point()):
        return []
    ends: list[int | Axis] = []
    for _, index, node in readers(value, _JOINING):
        here = bounds.of(node, index)
        other_use = not here and node.op_type not in _NEUTRAL and not _passes(node, index, _JOINING)
        if other_use and value.dtype.is_floating_point():
            return []
        ends += here
    return ends


def _passes(node: ir.Node, index: int, joining: Mapping[str, Collection[int]]) -> bool:
    return (node.op_type in _PASSING and index == 0) or index in joining.get(node.op_type, ())


def readers(
    value: ir.Value, joining: Mapping[str, Collection[int]] | None = None
) -> Iterator[tuple[ir.Value, int, ir.Node]]:
    """Yield the nodes that read the values of an input, also through passing and given joining operators."""
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        for use in current.uses():
            yield current, use.idx, use.node
            if _passes(use.node, use.idx, joining or {}):
                new = [output for output in use.node.outputs if output not in seen]
                seen.update(new)
                waiting += new


def table_readers(value: ir.Value) -> list[ir.Value]:
    """Return the tables whose rows are gathered by an input along axis 0."""
    tables = (
        node.inputs[0]
        for _, index, node in readers(value)
        if node.op_type == "Gather" and index == 1 and not int_attribute(node, "axis", 0)
    )
    return [table for table in dict.fromkeys(tables) if table is not None]


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
    fitting = [
        output for output in graph.outputs if output.dtype in (None, value.dtype) and _fits(output, value)
    ]
    named = [str(output.name) for output in fitting if output.name in wanted]
    named += [
        str(output.name)
        for output in fitting
        if re.fullmatch(re.escape(name) + r"_?(n|N|out|new|next)", str(output.name))
    ]
    return named[0] if named else None


def _fits(output: ir.Value, value: ir.Value) -> bool:
    if output.shape is None or value.shape is None or len(output.shape) != len(value.shape):
        return False
    pairs = zip(output.shape, value.shape, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
