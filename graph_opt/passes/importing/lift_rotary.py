"""Replace com.microsoft RotaryEmbedding by the standard one, on gathered rows of its tables."""

from __future__ import annotations

import onnx_ir as ir

from ...analysis.decoder_inputs import is_decoder
from ...analysis.rope_rows import RopeRows
from ...graph.edit import MICROSOFT, float_attribute, insert, int_attribute, nodes_of, remove_unused, replace
from ..base import GraphPass


class LiftRotaryPass(GraphPass):
    """Replace onnxruntime's RotaryEmbedding."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every node whose positions are [batch, sequence]."""
        rows = RopeRows(graph)
        for node in nodes_of(graph, "RotaryEmbedding", MICROSOFT):
            reason = "the graph is not a decoder" if not is_decoder(graph) else _misfit(node)
            if reason is not None:
                self.refuse(node, reason)
                continue
            x, positions, cos, sin = node.inputs[:4]
            tables = [rows.at(node, table, positions) for table in (cos, sin) if table is not None]
            names = ("interleaved", "num_heads", "rotary_embedding_dim")
            attributes = {name: int_attribute(node, name, 0) for name in names}
            made = insert(node, "RotaryEmbedding", [x, *tables], attributes)
            made.name = node.name
            replace(node.outputs[0], made.outputs[0])
            remove_unused(graph, node)
            self.fired += 1


def _misfit(node: ir.Node) -> str | None:
    if float_attribute(node, "scale", 1.0) != 1.0 or int_attribute(node, "is_packed_batching", 0):
        return "it has a scale other than 1, or is_packed_batching"
    shape = node.inputs[1].shape if node.inputs[1] is not None else None
    if shape is None or len(shape) != 2:
        return "its positions are not [batch, sequence]"
    x = node.inputs[0]
    if x is None or x.shape is None or (len(x.shape) != 4 and not int_attribute(node, "num_heads", 0)):
        return "its number of heads is unknown"
    return None
