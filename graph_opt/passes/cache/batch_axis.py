"""Read the batch size from ``input_ids`` where a graph reads it from a cache or from the attention mask.

torch's dynamo exporter takes the batch size from the last input that has it. In the portable graph all are
equal; lowered caches have another first axis, of slots or blocks, and lowered graphs have no mask.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, is_past
from ...graph.edit import insert, int_attribute, weight
from ..base import GraphPass


class BatchAxisPass(GraphPass):
    """Make every ``Shape`` of only the first axis of a cache or a mask read ``input_ids``."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Change the inputs of the nodes; part a Shape of all axes from a Gather of the first."""
        tokens = next((value for value in graph.inputs if value.name == INPUT_IDS), None)
        if tokens is None or tokens.shape is None:
            return
        for value in graph.inputs:
            if not is_past(value.name) and value.name != ATTENTION_MASK:
                continue
            if value.shape is None or value.shape[0] != tokens.shape[0]:
                continue
            for node in [use.node for use in value.uses() if use.node.op_type == "Shape"]:
                self._read_tokens(node, tokens)

    def _read_tokens(self, node: ir.Node, tokens: ir.Value) -> None:
        if int_attribute(node, "start", 0) == 0 and int_attribute(node, "end", 0) == 1:
            node.replace_input_with(0, tokens)
            self.fired += 1
            return
        if int_attribute(node, "start", 0) or "end" in node.attributes:
            return
        for use in list(node.outputs[0].uses()):
            index = weight(use.node.inputs[1]) if use.node.op_type == "Gather" and use.idx == 0 else None
            if index is not None and not index.numpy().any():
                use.node.replace_input_with(0, insert(node, "Shape", [tokens]).outputs[0])
                self.fired += 1
