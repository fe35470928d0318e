"""Rewrite the masks of cached attentions as one additive mask per window, in canonical form.

Traces write masks in many ways, and an Attention may have ``is_causal`` together with a padding mask. The
meaning of a mask is found by evaluation. Causal and sliding-window masks are rewritten unless they are in
canonical form already. The input ``attention_mask`` is added if it is missing.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import INPUT_IDS
from ...analysis.decoder_inputs import CausalMasks, find_input, is_decoder
from ...analysis.known_masks import is_canonical_mask, joined_mask, known_meaning
from ...graph.edit import int_attribute, nodes_of, static_size
from ..base import GraphPass


class CanonicalMaskPass(GraphPass):
    """Give every cached Attention of a decoder one additive mask."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every cached Attention whose mask is missing or not canonical."""
        if not is_decoder(graph):
            return
        one_token = static_size(find_input(graph, INPUT_IDS), 1) == 1
        masks, known = CausalMasks(graph), dict[tuple[ir.Value | None, bool], ir.Value | None]()
        for node in nodes_of(graph, "Attention"):
            stated_mask = node.inputs[3] if len(node.inputs) > 3 else None
            causal = bool(int_attribute(node, "is_causal", 0))
            if not _is_cached(node) or (stated_mask is None and not causal and not one_token):
                continue
            key = (stated_mask, causal)
            if key not in known:
                known[key] = self._written(graph, node, masks)
            mask = known[key]
            if mask is not stated_mask or causal:
                node.replace_input_with(3, mask)
                node.attributes.pop("is_causal", None)
                self.fired += 1

    def _written(self, graph: ir.Graph, node: ir.Node, masks: CausalMasks) -> ir.Value | None:
        """Return the canonical mask with the same meaning; the given mask if its meaning is unknown."""
        given = node.inputs[3] if len(node.inputs) > 3 else None
        if given is not None and is_canonical_mask(graph, given):
            return given
        mask = joined_mask(graph, masks, node, padding=True)
        if mask is None:  # a graph for one new token needs no causal mask: the token sees the whole past
            return masks.additive()
        known = known_meaning(graph, mask)
        if isinstance(known, str):
            self.refuse(node, known)
            return mask
        return masks.additive(known.window)


def _is_cached(node: ir.Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None
