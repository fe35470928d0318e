"""Let rows of ``image_states`` replace the embeddings of tokens, for a decoder that sees pictures.

    x = embedding(input_ids)   ->   x = Where(image_rows >= 0, Gather(image_states, image_rows), x)

``image_states`` [rows, hidden] holds what ``vision.onnx`` returns, and zeros in its last row;
``image_rows`` has the shape of ``input_ids`` and the row of each position, -1 for text. So a step without
pictures costs one Where, and the token of a place for a picture that the model writes is a plain embedding.
The stored graph stays a decoder of text, as it does for LoRA adapters.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ...contract import IMAGE_ROWS, IMAGE_STATES, INPUT_IDS
from ...errors import GraphError
from ..analysis.decoder_inputs import find_input
from ..graph.edit import insert, shared_constant, static_size
from ..passes.base import GraphPass

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class ImageInputsPass(GraphPass):
    """Add the inputs to a portable decoder. Must run before a lowering.

    Raises:
        GraphError: the graph does not look its tokens up in one table of known width.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, with known shapes."""
        common.ShapeInferencePass()(model)
        return super().call(model)

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the embeddings where a row is given."""
        embedded, width = _embedding(graph)
        states = ir.val(IMAGE_STATES, ir.DataType.FLOAT, ir.Shape(["image_rows", width]))
        ids = find_input(graph, INPUT_IDS)
        rows = ir.val(IMAGE_ROWS, ir.DataType.INT64, None if ids is None else ids.shape)
        graph.inputs.extend([states, rows])
        users = [(use.node, use.idx) for use in embedded.uses()]
        readers = {node for node, _ in users}
        lookup = next(node for node in graph if node in readers)
        zero = shared_constant(graph, "images.zero", np.array(0, np.int64))
        last = shared_constant(graph, "images.last_axis", np.array([-1], np.int64))
        given = insert(lookup, "GreaterOrEqual", [rows, zero]).outputs[0]
        given = insert(lookup, "Unsqueeze", [given, last]).outputs[0]
        seen = insert(lookup, "Gather", [states, rows], {"axis": 0}).outputs[0]
        if embedded.dtype not in (None, ir.DataType.FLOAT):
            seen = insert(lookup, "Cast", [seen], {"to": int(embedded.dtype)}).outputs[0]
        chosen = insert(lookup, "Where", [given, seen, embedded])
        for node, index in users:
            node.replace_input_with(index, chosen.outputs[0])
        chosen.outputs[0].type, chosen.outputs[0].shape = embedded.type, embedded.shape
        self.fired += 1


def _embedding(graph: ir.Graph) -> tuple[ir.Value, int]:
    """Return the embeddings of the tokens, [batch, sequence, hidden], and the hidden size."""
    ids = find_input(graph, INPUT_IDS)
    lookups = [] if ids is None else [use.node for use in ids.uses() if use.node.op_type.startswith("Gather")]
    values = [node.outputs[0] for node in lookups]
    width = static_size(values[0], -1) if len(values) == 1 else None
    if width is None or values[0].dtype not in (None, *_FLOATS):
        raise GraphError(
            f"pictures need a decoder that looks its tokens up in one table; this one has {len(values)} "
            "look-ups of its input_ids, or a table of unknown width"
        )
    return values[0], width
