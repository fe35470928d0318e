"""Convert between [batch, heads, sequence, head_dim] and the canonical [batch, sequence, heads * head_dim].

``simplify_shapes.py`` cancels the inserted transposes and reshapes with those around them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph.edit import insert, shared_constant, static_size

_SWAP = [0, 2, 1, 3]


def head_sizes(value: ir.Value | None, axis: int = 1) -> tuple[int, int] | None:
    """Return heads and head_dim of a value [batch, heads, sequence, head_dim], None if they are not fixed.

    Args:
        value: of rank 4.
        axis: 1, or 2 if the heads come behind the sequence.
    """
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, size = static_size(value, axis), static_size(value, 3)
    return None if heads is None or size is None else (heads, size)


def join_heads(before: ir.Node, value: ir.Value, axis: int = 1) -> ir.Value:
    """Convert [batch, heads, sequence, head_dim] into [batch, sequence, heads * head_dim]."""
    sizes = head_sizes(value, axis)
    if sizes is None:
        raise ValueError(f"{value.name} has no fixed number of heads and head_dim")
    if axis == 1:
        value = insert(before, "Transpose", [value], {"perm": _SWAP}).outputs[0]
    return _reshape(before, value, [0, 0, sizes[0] * sizes[1]])


def split_heads(before: ir.Node, value: ir.Value, heads: int, size: int, axis: int = 1) -> ir.Value:
    """Convert [batch, sequence, heads * head_dim] into [batch, heads, sequence, head_dim]."""
    split = _reshape(before, value, [0, 0, heads, size])
    return insert(before, "Transpose", [split], {"perm": _SWAP}).outputs[0] if axis == 1 else split


def _reshape(before: ir.Node, value: ir.Value, shape: list[int]) -> ir.Value:
    graph = before.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {before.name} does not belong to a graph")
    name = "shape." + "_".join(map(str, shape))
    target = shared_constant(graph, name, np.array(shape, np.int64))
    return insert(before, "Reshape", [value, target]).outputs[0]
