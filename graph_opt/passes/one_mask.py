"""One additive mask for all cached attentions that see alike, written in one way.

Traces write masks in endless forms, and an Attention may say ``is_causal`` beside a padding mask. What a mask
means is found by evaluating it; those known, causal ones and sliding windows, are written anew, unless that
is how they are written already. Graphs without ``attention_mask`` get it.
"""

from __future__ import annotations

import onnx_ir as ir

from ..edit import int_attribute, nodes_of, static_size
from .base import GraphPass
from .decoder_inputs import CausalMasks, find_input, first_cache, is_decoder
from .known_masks import joined_mask, known_meaning, numbers_above, same_computation


class OneMaskPass(GraphPass):
    """Give every cached Attention of a decoder one additive mask."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite what has another mask, none, or a graph without padding."""
        if not is_decoder(graph):
            return
        unpadded = find_input(graph, "attention_mask") is None
        one_token = static_size(find_input(graph, "input_ids"), 1) == 1
        masks, made = CausalMasks(graph), dict[tuple[ir.Value | None, bool], ir.Value | None]()
        for node in nodes_of(graph, "Attention"):
            given = node.inputs[3] if len(node.inputs) > 3 else None
            causal = bool(int_attribute(node, "is_causal", 0))
            if not _is_cached(node) or (given is None and not causal and not one_token):
                continue
            key = (given, causal)
            if key not in made:
                made[key] = self._written(graph, node, masks, unpadded)
            mask = made[key]
            if mask is not given or causal:
                node.replace_input_with(3, mask)
                node.attributes.pop("is_causal", None)
                self.fired += 1

    def _written(self, graph: ir.Graph, node: ir.Node, masks: CausalMasks, unpadded: bool) -> ir.Value | None:
        """Return the mask written in the one way of its meaning, or as it is."""
        given = node.inputs[3] if len(node.inputs) > 3 else None
        if given is not None and _is_the_one_way(graph, given):
            return given
        mask = joined_mask(graph, masks, node, unpadded)
        if mask is None:  # the only new token of a graph sees all that is past
            return masks.additive()
        known = known_meaning(graph, mask)
        if isinstance(known, str):
            self.refuse(node, known)
            return mask
        return masks.additive(known.window)


def _is_cached(node: ir.Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None


def _is_the_one_way(graph: ir.Graph, mask: ir.Value) -> bool:
    """Return whether a mask is what ``CausalMasks`` would write of the same inputs."""
    inputs = [find_input(graph, "input_ids"), find_input(graph, "attention_mask"), first_cache(graph)]
    copies = [ir.val(str(x.name), x.dtype, x.shape) for x in inputs if x is not None]
    if len(copies) < len(inputs):
        return False
    aside = ir.Graph(copies, [], nodes=[ir.node("Identity", copies[:1])], opset_imports=graph.opset_imports)
    masks = CausalMasks(aside)
    return any(same_computation(mask, masks.additive(window)) for window in (None, *numbers_above(mask)))
