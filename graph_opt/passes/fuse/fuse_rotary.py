"""Fuse rotary embeddings of queries and keys into RotaryEmbedding on [batch, sequence, heads * head_dim].

Su et al., "RoFormer" (2021). The search starts at the sum x * cos + rotated(x) * sin. Whether x is rotated in
halves or in interleaved pairs, wholly or partially, is found by evaluation on random angles.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS
from ....errors import GraphError
from ...analysis.head_layout import head_sizes, join_heads, split_heads
from ...analysis.probe import Probe
from ...analysis.region import Array, close, region
from ...graph.edit import (
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    static_size,
)
from ..base import GraphPass
from .rotations import RotaryMatch, rotation, rotation_of_parts, with_unrotated_part

_POSITIONS = np.array([[3, 0, 17, 1, 250], [5, 9, 2, 31, 64]])
_SHORTEST = 16  # positions of a table

_SEARCHES = {"Add": rotation, "Concat": rotation_of_parts}


class FuseRotaryPass(GraphPass):
    """Replace rotary embeddings that are written as several nodes, and convert 4-D RotaryEmbedding to 3-D."""

    def __init__(self) -> None:
        super().__init__()
        self._angles: dict[tuple[ir.Value, bool, bool, int], ir.Value | str] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every sum of two products, joined parts of x, and every 4-D RotaryEmbedding."""
        self._angles = {}
        for node in list(graph):
            search = _SEARCHES.get(node.op_type) if node.graph is graph and not node.domain else None
            found = search(node) if search is not None else None
            if found is None:
                continue
            reason = self._fuse(graph, with_unrotated_part(found))
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)
        for node in nodes_of(graph, "RotaryEmbedding"):
            self.fired += _join_heads_of(node)

    def _fuse(self, graph: ir.Graph, match: RotaryMatch) -> str | None:
        axis = match.heads_axis
        sizes = head_sizes(match.x, axis)
        if sizes is None:
            return "x is not [batch, heads, sequence, head_dim] with fixed heads and head_dim"
        width = static_size(match.cos, -1)
        if width is None or (width % 2 and not match.halved) or width > sizes[1] // (1 + match.halved):
            return f"cos has {width} columns for a head size of {sizes[1]}"
        rotary = width * (1 + match.halved)
        interleaved = _is_interleaved(match, sizes, rotary)
        if isinstance(interleaved, str):
            return interleaved
        angles = [self._half(graph, table, interleaved, match) for table in (match.cos, match.sin)]
        for angle in angles:
            if isinstance(angle, str):
                return angle
        last = match.output.producer()
        if last is None:
            raise AssertionError("unreachable: the output of a rotation has a producer")
        operands = [
            join_heads(last, match.x, axis),
            *(angle for angle in angles if isinstance(angle, ir.Value)),
        ]
        attributes = {"num_heads": sizes[0], "interleaved": int(interleaved)}
        if rotary < sizes[1]:
            attributes["rotary_embedding_dim"] = rotary
        rotated = insert(last, "RotaryEmbedding", operands, attributes).outputs[0]
        replace(match.output, split_heads(last, rotated, *sizes, axis))
        remove_unused(graph, last)
        return None

    def _half(
        self, graph: ir.Graph, table: ir.Value, interleaved: bool, match: RotaryMatch
    ) -> ir.Value | str:
        """Return half a table, [batch, sequence, rotary / 2], or why it is not known."""
        key = (table, interleaved, match.halved, match.heads_axis)
        if key not in self._angles:
            self._angles[key] = _angles(graph, *key)
        return self._angles[key]


def _is_interleaved(match: RotaryMatch, sizes: tuple[int, int], rotary: int) -> bool | str:
    """Return True for interleaved pairs, False for halves, or why the region is not a rotation."""
    part = region([match.x, match.cos, match.sin], match.output)
    if isinstance(part, str):
        return part
    rng = np.random.default_rng(rotary)
    x = rng.standard_normal((2, sizes[0], 3, sizes[1])).astype(np.float32)
    cos, sin = rng.standard_normal((2, 2, 1, 3, rotary // 2)).astype(np.float32)
    if match.heads_axis == 2:
        x, cos, sin = (array.swapaxes(1, 2).copy() for array in (x, cos, sin))
    for interleaved in (False, True):
        tables = [_table(half, match.halved, interleaved) for half in (cos, sin)]
        if close(part(x, *tables), _rotate(x, cos, sin, interleaved), 1e-6):
            return interleaved
    return "the sum of products is not a rotation"


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (
            slice(0, half),
            slice(half, 2 * half),
        )
    )
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def _table(half: Array, halved: bool, interleaved: bool) -> Array:
    if halved:
        return half
    return np.repeat(half, 2, -1) if interleaved else np.concatenate([half, half], -1)


def _angles(
    graph: ir.Graph, table: ir.Value, interleaved: bool, halved: bool, heads_axis: int
) -> ir.Value | str:
    """Return the first half of a table, or all of a halved one, as [batch, sequence, rotary / 2]."""
    values = _values(graph, table)
    if isinstance(values, str):
        return values
    width = values.shape[-1]
    left, right = (
        (values[..., ::2], values[..., 1::2])
        if interleaved
        else (values[..., : width // 2], values[..., width // 2 :])
    )
    if not halved and not np.array_equal(left, right):
        return "the two halves of cos or sin differ"
    first = next(node for node in graph if any(value is table for value in node.inputs))

    def whole(name: str, number: int) -> ir.Value:
        return shared_constant(graph, f"rope.{name}", np.array([number], np.int64))

    if not halved:
        end = width if interleaved else width // 2
        bounds = [whole("start", 0), whole(f"end_{end}", end), whole("axis", 3)]
        steps = [whole("step", 2)] if interleaved else []
        table = insert(first, "Slice", [table, *bounds, *steps]).outputs[0]
    return insert(first, "Squeeze", [table, whole(f"heads_{heads_axis}", heads_axis)]).outputs[0]


def _values(graph: ir.Graph, table: ir.Value) -> Array | str:
    """Return a table for some positions, or why it does not depend only on positions."""
    probe = Probe(graph, table)
    unknown = {name for name in probe.input_names if name in (INPUT_IDS, LOGITS)}
    if unknown:
        return f"the angles depend on {sorted(unknown)}"
    try:
        return _probed(probe, _POSITIONS)
    except GraphError:
        pass  # a table of the angles may have fewer positions
    try:
        return _probed(probe, _POSITIONS % _SHORTEST)
    except GraphError as error:
        return str(error)


def _probed(probe: Probe, positions: Array) -> Array:
    batch, length = positions.shape
    feed: dict[str, Array] = {POSITION_IDS: positions, ATTENTION_MASK: np.ones((batch, length), np.int64)}
    for value in probe.inputs:
        if str(value.name) not in feed:
            sizes = (batch, static_size(value, 1) or 1, 0, static_size(value, 3) or 1)
            feed[str(value.name)] = np.zeros(sizes, np.float32)
    return probe(feed)


def _join_heads_of(node: ir.Node) -> bool:
    """Convert a RotaryEmbedding on [batch, heads, sequence, head_dim] to the canonical layout."""
    x, graph = node.inputs[0], node.graph
    sizes = head_sizes(x)
    if x is None or sizes is None or not isinstance(graph, ir.Graph):
        return False
    attributes = {
        "num_heads": sizes[0],
        "interleaved": int_attribute(node, "interleaved", 0),
        "rotary_embedding_dim": int_attribute(node, "rotary_embedding_dim", 0),
    }
    rotated = insert(node, "RotaryEmbedding", [join_heads(node, x), *node.inputs[1:]], attributes)
    replace(node.outputs[0], split_heads(node, rotated.outputs[0], *sizes))
    remove_unused(graph, node)
    return True
