"""One additive mask for all cached attentions that see alike, written in one way.

Traces write masks in endless forms, and an Attention may say ``is_causal`` beside a padding mask. What a mask
means is found by evaluating it; those known, causal ones and sliding windows, are written anew. Graphs
without ``attention_mask`` get it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.errors import GraphError
from .. import probe
from ..edit import insert, int_attribute, nodes_of, shared_constant
from .base import GraphPass
from .decoder_inputs import LOWEST, CausalMasks, find_input, is_decoder

_SHORT = 64  # tokens; the length at which masks without numbers in them are evaluated
_ENDLESS = 1 << 30  # as an end in a Slice
_LARGEST_WINDOW = 4096  # masks with larger numbers stay as they are written: evaluating them costs too much


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
            if given is None and not causal:
                continue
            key = (given, causal)
            if key not in made:
                made[key] = self._rewritten(graph, node, masks, _joined(graph, masks, node, unpadded))
            node.replace_input_with(3, made[key])
            node.attributes.pop("is_causal", None)
            self.fired += 1

    def _rewritten(self, graph: ir.Graph, node: ir.Node, masks: CausalMasks, mask: ir.Value) -> ir.Value:
        """Return the mask written in the one way of its meaning, or as it is."""
        numbers = _numbers_above(mask)
        if any(number > _LARGEST_WINDOW for number in numbers):
            self.refuse(node, f"its mask computes with {max(numbers)}, too large to evaluate")
            return mask
        try:
            known = probe.mask_meaning(graph, mask, max([_SHORT, *(number + 2 for number in numbers)]))
        except GraphError as error:
            known = str(error)
        if isinstance(known, str):
            self.refuse(node, known)
            return mask
        return masks.additive(known.window)


def _numbers_above(mask: ir.Value) -> list[int]:
    """Return the whole numbers that a mask may be made with, as the size of its window."""
    found: set[int] = set()
    seen: set[ir.Value] = set()
    waiting = [mask]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        tensor, node = value.const_value, value.producer()
        if tensor is not None and tensor.size == 1:
            number = abs(float(tensor.numpy().item()))
            found |= {int(number)} if 1 < number < _ENDLESS and number.is_integer() else set()
        elif node is not None:
            waiting += [operand for operand in node.inputs if operand is not None]
    return sorted(found)


def _is_cached(node: ir.Node) -> bool:
    return len(node.inputs) > 5 and node.inputs[4] is not None and node.inputs[5] is not None


def _joined(graph: ir.Graph, masks: CausalMasks, node: ir.Node, unpadded: bool) -> ir.Value:
    """Return one additive mask that says all that a node's operand, attribute and graph say."""
    given = node.inputs[3] if len(node.inputs) > 3 else None
    causal = bool(int_attribute(node, "is_causal", 0))
    if given is None:
        return masks.additive()
    hidden = ([masks.visible()] if causal else []) + ([masks.real()] if unpadded else [])
    if given.dtype != ir.DataType.BOOL and not hidden:
        return given
    reader = next(node for node in graph if any(value is given for value in node.inputs))
    if given.dtype == ir.DataType.BOOL:
        seen = given
        for condition in hidden:
            seen = insert(reader, "And", [seen, condition]).outputs[0]
        return masks.as_numbers(seen, reader)
    lowest = shared_constant(graph, "mask.lowest", np.array(LOWEST, np.float32))
    mask = given
    for condition in hidden:
        mask = insert(reader, "Where", [condition, mask, lowest]).outputs[0]
    mask.shape, mask.dtype = given.shape, ir.DataType.FLOAT
    return mask
