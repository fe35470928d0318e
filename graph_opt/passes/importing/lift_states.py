"""Replace onnxruntime's operators with recurrent states by the standard ones of opset 27.

onnxruntime-genai's builder writes them. Definitions:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import STATES_OPSET
from ...graph.edit import MICROSOFT, insert, int_attribute, remove_unused, replace
from ...graph.recurrent_states import ATTRIBUTES
from ..base import GraphPass


class LiftStatesPass(GraphPass):
    """Replace CausalConvWithState and LinearAttention, and state the opset that has them."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every node whose states are those behind the last token only."""
        for node in list(graph):
            if node.domain != MICROSOFT or node.op_type not in ATTRIBUTES:
                continue
            if int_attribute(node, "state_window", 0) or int_attribute(node, "ndim", 1) != 1:
                self.refuse(node, "it returns states behind several tokens, or has more than one axis")
                continue
            kept = ATTRIBUTES[node.op_type] & set(node.attributes)
            attributes = {name: node.attributes[name].value for name in kept}
            lifted = insert(node, node.op_type, node.inputs, attributes, num_outputs=2)
            lifted.name = node.name
            for old, new in zip(node.outputs, lifted.outputs, strict=False):
                replace(old, new)
            remove_unused(graph, node)
            self.fired += 1
        if self.fired:
            graph.opset_imports[""] = max(graph.opset_imports.get("", 0), STATES_OPSET)
