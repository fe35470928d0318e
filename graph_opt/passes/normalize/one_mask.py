"""One additive mask for all cached attentions that see alike, written in one way.

Traces write masks in endless forms, and an Attention may say ``is_causal`` beside a padding mask. What a mask
means is found by evaluating it; those known, causal ones and sliding windows, are written anew, unless that
is how they are written already. Graphs without ``attention_mask`` get it.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import INPUT_IDS
from ...analysis.decoder_inputs import CausalMasks, find_input, is_decoder
from ...analysis.known_masks import is_one_way, joined_mask, known_meaning
from ...graph.edit import int_attribute, nodes_of, static_size
from ..base import GraphPass


class OneMaskPass(GraphPass):
    """Give every cached Attention of a decoder one additive mask."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite what has another mask, none, or a graph without padding."""
        if not is_decoder(graph):
            return
        one_token = static_size(find_input(graph, INPUT_IDS), 1) == 1
        masks, made = CausalMasks(graph), dict[tuple[ir.Value | None, bool], ir.Value | None]()
        for node in nodes_of(graph, "Attention"):
            given = node.inputs[3] if len(node.inputs) > 3 else None
            causal = bool(int_attribute(node, "is_causal", 0))
            if not _is_cached(node) or (given is None and not causal and not one_token):
                continue
            key = (given, causal)
            if key not in made:
                made[key] = self._written(graph, node, masks)
            mask = made[key]
            if mask is not given or causal:
                node.replace_input_with(3, mask)
                node.attributes.pop("is_causal", None)
                self.fired += 1

    def _written(self, graph: ir.Graph, node: ir.Node, masks: CausalMasks) -> ir.Value | None:
        """Return the mask written in the one way of its meaning, or as it is."""
        given = node.inputs[3] if len(node.inputs) > 3 else None
        if given is not None and is_one_way(graph, given):
            return given
        mask = joined_mask(graph, masks, node, padding=True)
        if mask is None:  # the only new token of a graph sees all that is past
            return masks.additive()
        known = known_meaning(graph, mask)
        if isinstance(known, str):
            self.refuse(node, known)
            return mask
        return masks.additive(known.window)


def _is_cached(node: ir.Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None
