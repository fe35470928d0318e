"""Make a decoder that was traced for one new token accept any number of new tokens.

If only attention mixes tokens (``token_axes.py``) and every attention is causal, several tokens at once give
the same results as one after the other. Then only the constant target shapes of reshapes must change.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import INPUT_IDS
from ...analysis.decoder_inputs import find_input, first_cache, fixed_tokens
from ...analysis.known_masks import is_canonical_mask
from ...analysis.probe_sizes import PROBES
from ...analysis.token_axes import Mixed, TokenAxes
from ...graph.edit import insert, nodes_of, remove_unused, replace, shared_constant, static_size
from ..base import GraphPass
from ..normalize.simplify_shapes import reshape_target

_SHAPE_CHANGERS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})


class FreeTokensPass(GraphPass):
    """Make the sequence axis of a graph for one new token dynamic."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the target shapes of all reshapes between tokens and logits."""
        ids = find_input(graph, INPUT_IDS)
        tokens, fixed = static_size(ids, 1), fixed_tokens(graph)
        if ids is None or fixed is None or tokens != 1:
            if fixed is not None and first_cache(graph) is not None:
                self.refuse(graph[0], fixed)
            return
        unknown = next((x for x in nodes_of(graph, "Attention") if not _is_causal(graph, x)), None)
        if unknown is not None:
            self.refuse(
                unknown, "the graph accepts one token at a time; this has no cache, or an unknown mask"
            )
            return
        try:
            walk = TokenAxes(graph)
            changing = [node for node in graph if _changes_shape(walk, node)]
            changed = [(node, _freed_target(walk, node), _leaves_rows(walk, node)) for node in changing]
        except Mixed as mixed:
            self.refuse(mixed.node, f"the graph accepts one token at a time, and cannot be changed: {mixed}")
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


def _is_causal(graph: ir.Graph, node: ir.Node) -> bool:
    mask = node.inputs[3] if len(node.inputs) > 5 and node.inputs[4] is not None else None
    return mask is not None and is_canonical_mask(graph, mask)


def _changes_shape(walk: TokenAxes, node: ir.Node) -> bool:
    ends = (node.inputs[0], node.outputs[0])
    return node.op_type in _SHAPE_CHANGERS and not node.domain and all(value in walk.axes for value in ends)


def _leaves_rows(walk: TokenAxes, node: ir.Node) -> bool:
    """Return whether a node splits the merged token axis into batch and sequence, both dynamic."""
    return walk.axes[walk.operand(node, 0)].flat and not walk.axes[node.outputs[0]].flat


def _freed_target(walk: TokenAxes, node: ir.Node) -> list[int]:
    """Return the target shape of a node for any number of tokens.

    If the node splits the merged token axis, batch and sequence are left out.

    Raises:
        Mixed: no constant target shape exists.
    """
    before, after = (_freed(walk, value) for value in (walk.operand(node, 0), node.outputs[0]))
    if _leaves_rows(walk, node):
        after = [shape[2:] for shape in after]
    target = reshape_target(tuple(before), tuple(after))
    if target is None:
        raise Mixed(node, f"{node.op_type} has no constant target shape for more tokens")
    return target


def _freed(walk: TokenAxes, value: ir.Value) -> list[tuple[int, ...]]:
    """Return the shapes of a value with more than one token."""
    axis, places = walk.axes[value], []
    for shape, sizes, probe in zip(walk.shapes(value), walk.sizes, PROBES, strict=True):
        tokens = sizes.batch * probe.sequence if axis.flat else probe.sequence
        places.append((*shape[: axis.index], tokens, *shape[axis.index + 1 :]))
    return places


def _after_rows(before: ir.Node, ids: ir.Value, rest: ir.Value) -> ir.Value:
    lead = insert(before, "Shape", [ids]).outputs[0]
    return insert(before, "Concat", [lead, rest], {"axis": 0}).outputs[0]
