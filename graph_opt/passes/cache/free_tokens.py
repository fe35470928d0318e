"""A decoder traced for one new token at a time -> one for any number of them.

Where nothing but attention mixes tokens (``token_axes.py``), and every attention has a mask that lets each
token see what is past and itself, many tokens at once are what one after the other would be. Only shapes
that were written down as numbers stand in the way.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS
from ...analysis.decoder_inputs import find_input, first_cache, fixed_tokens
from ...analysis.known_masks import is_one_way
from ...analysis.probe_sizes import PROBES
from ...analysis.token_axes import Mixed, TokenAxes
from ...graph.edit import insert, nodes_of, remove_unused, replace, shared_constant, static_size
from ..base import GraphPass
from ..normalize.simplify_shapes import reshape_target

_SHAPE_CHANGERS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})


class FreeTokensPass(GraphPass):
    """Let a graph for one new token take any number."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Write the shapes of everything on the way from tokens to logits anew."""
        ids = find_input(graph, INPUT_IDS)
        tokens, fixed = static_size(ids, 1), fixed_tokens(graph)
        if ids is None or fixed is None or tokens != 1:
            if fixed is not None and first_cache(graph) is not None:
                self.refuse(graph[0], fixed)
            return
        unknown = next((x for x in nodes_of(graph, "Attention") if not _looks_back(graph, x)), None)
        if unknown is not None:
            self.refuse(unknown, "the graph takes one token at a time; this has no cache, or no known mask")
            return
        try:
            walk = TokenAxes(graph)
            changing = [node for node in graph if _changes_shape(walk, node)]
            changed = [(node, _freed_target(walk, node), _leaves_rows(walk, node)) for node in changing]
        except Mixed as mixed:
            self.refuse(mixed.node, f"the graph takes one token at a time, and must: {mixed}")
            return
        for node, target, leaves_rows in changed:
            constant = shared_constant(
                graph, "shape." + "_".join(map(str, target)), np.array(target, np.int64)
            )
            shape = _after_rows(node, ids, constant) if leaves_rows else constant
            replace(node.outputs[0], insert(node, "Reshape", [node.inputs[0], shape]).outputs[0])
            remove_unused(graph, node)
        for value, axis in walk.axes.items():
            if value.shape is not None:
                axes = list(value.shape)
                axes[axis.index] = ir.SymbolicDim(None if axis.flat else "sequence")
                value.shape = ir.Shape(axes)
        self.fired += 1


def _looks_back(graph: ir.Graph, node: ir.Node) -> bool:
    mask = node.inputs[3] if len(node.inputs) > 5 and node.inputs[4] is not None else None
    return mask is not None and is_one_way(graph, mask)


def _changes_shape(walk: TokenAxes, node: ir.Node) -> bool:
    ends = (node.inputs[0], node.outputs[0])
    return node.op_type in _SHAPE_CHANGERS and not node.domain and all(value in walk.axes for value in ends)


def _leaves_rows(walk: TokenAxes, node: ir.Node) -> bool:
    """Whether tokens of all rows on one axis come apart: no constant says how many go where."""
    return walk.axes[walk.operand(node, 0)].flat and not walk.axes[node.outputs[0]].flat


def _freed_target(walk: TokenAxes, node: ir.Node) -> list[int]:
    """Return what shape a node gives to any number of tokens, without batch and sequence if it parts rows.

    Raises:
        Mixed: no constant says it.
    """
    before, after = (_freed(walk, value) for value in (walk.operand(node, 0), node.outputs[0]))
    if _leaves_rows(walk, node):
        after = [shape[2:] for shape in after]
    target = reshape_target(tuple(before), tuple(after))
    if target is None:
        raise Mixed(node, f"{node.op_type} has no constant shape for more")
    return target


def _freed(walk: TokenAxes, value: ir.Value) -> list[tuple[int, ...]]:
    """Return the shapes that a value has with more tokens than one."""
    axis, found = walk.axes[value], []
    for shape, sizes, probe in zip(walk.shapes(value), walk.sizes, PROBES, strict=True):
        tokens = sizes.batch * probe.sequence if axis.flat else probe.sequence
        found.append((*shape[: axis.index], tokens, *shape[axis.index + 1 :]))
    return found


def _after_rows(before: ir.Node, ids: ir.Value, rest: ir.Value) -> ir.Value:
    lead = insert(before, "Shape", [ids]).outputs[0]
    return insert(before, "Concat", [lead, rest], {"axis": 0}).outputs[0]
