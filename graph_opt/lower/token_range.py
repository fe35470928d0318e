"""State in the metadata which token ids a graph embeds: kernels of devices do not check indices."""

from __future__ import annotations

import onnx_ir as ir

from ...contract import INPUT_IDS, NUM_TOKENS
from ..analysis.decoder_inputs import find_input
from ..graph.edit import static_size
from ..passes.base import GraphPass


class TokenRangePass(GraphPass):
    """Store the number of rows of the embedding table as ``num_tokens``, if ``input_ids`` look up one.

    Shapes must be inferred.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change the metadata only."""
        result = super().call(model)
        if self._rows:
            model.metadata_props[NUM_TOKENS] = str(self._rows)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Find the table without changing the graph."""
        ids = find_input(graph, INPUT_IDS)
        lookups = [use.node for use in ids.uses() if use.node.op_type == "Gather"] if ids is not None else []
        self._rows = min((static_size(node.inputs[0], 0) or 0 for node in lookups), default=0)
