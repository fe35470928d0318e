"""Causality said by an attribute, and masks of booleans -> one additive mask; padding of the contract in all.

An Attention may say ``is_causal`` and take a padding mask as well. The canonical graph says both in one mask,
so that a lowering has one value to look at. Graphs without ``attention_mask`` get it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..edit import insert, int_attribute, nodes_of, shared_constant
from .base import GraphPass
from .decoder_inputs import LOWEST, CausalMasks, find_input, is_decoder


class OneMaskPass(GraphPass):
    """Give every cached Attention of a decoder one additive mask."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite what has another mask, none, or a graph without padding."""
        if not is_decoder(graph):
            return
        nodes = [node for node in nodes_of(graph, "Attention") if _is_cached(node)]
        if not nodes:
            return
        unpadded = find_input(graph, "attention_mask") is None
        masks, made = CausalMasks(graph), dict[tuple[ir.Value | None, bool], ir.Value]()
        for node in nodes:
            given = node.inputs[3] if len(node.inputs) > 3 else None
            causal = bool(int_attribute(node, "is_causal", 0))
            if not causal and (given is None or not (unpadded or given.dtype == ir.DataType.BOOL)):
                continue
            key = (given, causal)
            if key not in made:
                made[key] = _joined(graph, masks, given, causal, unpadded)
            node.replace_input_with(3, made[key])
            node.attributes.pop("is_causal", None)
            self.fired += 1


def _is_cached(node: ir.Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None


def _joined(
    graph: ir.Graph, masks: CausalMasks, given: ir.Value | None, causal: bool, unpadded: bool
) -> ir.Value:
    if given is None:
        return masks.additive()
    reader = next(node for node in graph if any(value is given for value in node.inputs))
    hidden = ([masks.visible()] if causal else []) + ([masks.real()] if unpadded else [])
    if given.dtype == ir.DataType.BOOL:
        seen = given
        for condition in hidden:
            seen = insert(reader, "And", [seen, condition]).outputs[0]
        return masks.as_numbers(seen, reader)
    lowest = shared_constant(graph, "mask.lowest", np.array(LOWEST, np.float32))
    mask = insert(reader, "Max", [given, lowest]).outputs[0]
    for condition in hidden:
        mask = insert(reader, "Where", [condition, mask, lowest]).outputs[0]
    mask.shape, mask.dtype = given.shape, ir.DataType.FLOAT
    return mask
