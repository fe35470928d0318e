"""Fuse the gate of a MLP behind merged products into carryall's own ``SiluAndMul``, which splits its input.

``g, u = Split(x); QuickGelu(g) * u`` becomes ``SiluAndMul(x)``.
"""

from __future__ import annotations

import onnx_ir as ir

from ...graph.edit import MICROSOFT, constant, insert, int_attribute, nodes_of, remove_unused, replace
from ...passes.base import GraphPass
from .quantized_linear import DOMAIN


class SiluAndMulPass(GraphPass):
    """Rewrite every Split into two halves whose first one is the gate of the second."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every QuickGelu with alpha 1."""
        for silu in nodes_of(graph, "QuickGelu", MICROSOFT):
            product = _gated(silu)
            split = silu.inputs[0].producer() if silu.inputs[0] is not None else None
            if product is None or split is None or not _halves(split):
                continue
            lowered = insert(product, "SiluAndMul", [split.inputs[0]], {}, domain=DOMAIN)
            lowered.name = product.name
            replace(product.outputs[0], lowered.outputs[0])
            remove_unused(graph, product)
            self.fired += 1


def _gated(silu: ir.Node) -> ir.Node | None:
    """Return the product of silu(the first half) and the second half, if it is their only use."""
    alpha = silu.attributes.get("alpha")
    if alpha is None or alpha.as_float() != 1.0:
        return None
    uses = list(silu.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Mul" or silu.outputs[0].is_graph_output():
        return None
    product = uses[0].node
    split = silu.inputs[0].producer() if silu.inputs[0] is not None else None
    if split is None or list(split.outputs[:1]) != [silu.inputs[0]] or len(split.outputs) != 2:
        return None
    single = all(len(half.uses()) == 1 and not half.is_graph_output() for half in split.outputs)
    return product if single and product.inputs[1 - uses[0].idx] is split.outputs[1] else None


def _halves(split: ir.Node) -> bool:
    """Return whether a node splits the last axis into two parts of one size."""
    if split.op_type != "Split" or split.domain or int_attribute(split, "axis", 0) != -1:
        return False
    sizes = constant(split.inputs[1]) if len(split.inputs) > 1 else None
    return sizes is not None and len(sizes) == 2 and sizes[0] == sizes[1]
