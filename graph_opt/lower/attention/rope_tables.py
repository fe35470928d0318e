"""Replace rotary angles computed from positions by rows of a precomputed table of context_length rows.

The angles of a token then depend on its position only, also for ropes whose formula depends on the longest
row.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import CONTEXT_LENGTH, POSITION_IDS
from ...analysis import probe
from ...graph.edit import add_initializer, insert, nodes_of
from ...passes.base import GraphPass


class RopeTablesPass(GraphPass):
    """Make every RotaryEmbedding gather its angles [batch, sequence, rotary_dim / 2] by ``position_ids``.

    Args:
        context_length: maximum tokens of a sequence.
    """

    def __init__(self, context_length: int) -> None:
        super().__init__()
        self.context_length = context_length

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, and store the context length in its metadata."""
        result = super().call(model)
        model.metadata_props[CONTEXT_LENGTH] = str(self.context_length)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Gather each angle once."""
        gathered: dict[ir.Value, ir.Value] = {}
        for node in nodes_of(graph, "RotaryEmbedding"):
            if len(node.inputs) > 3 and node.inputs[3] is not None:
                self.refuse(node, "its angles already come from a table")
                continue
            if probe.turns_with_axes(node.inputs[1]):
                self.refuse(node, "its positions have several axes")
                continue
            for position in (1, 2):
                angle = node.inputs[position]
                if angle is None or angle in gathered.values():
                    continue
                if angle not in gathered:
                    gathered[angle] = self._gather(graph, angle)
                node.replace_input_with(position, gathered[angle])
            self.fired += 1

    def _gather(self, graph: ir.Graph, angle: ir.Value) -> ir.Value:
        dtype = angle.dtype or ir.DataType.FLOAT
        content = probe.rope_table(graph, angle, self.context_length).astype(dtype.numpy())
        table = add_initializer(graph, f"{angle.name}_table", ir.tensor(content))
        positions = next(value for value in graph.inputs if value.name == POSITION_IDS)
        row = insert(graph[0], "Gather", [table, positions]).outputs[0]
        row.type, row.shape = ir.TensorType(dtype), angle.shape
        return row
