"""Draw tokens on the device, and read a token that the run before has drawn, without the host between them.

    logits, top_logits, top_token_ids, draw [wanted, 5]   ->   drawn_tokens [wanted]
    input_ids, token_sources [tokens, 1], drawn_before [n]   ->   the tokens of the run

A token is drawn from the best logits alone. Of their weights at the temperature, those of the first ``top_k``
are kept, within ``top_p`` of the whole weight, and of at least ``min_p`` of the largest; the first token is
chosen whose cumulated weight exceeds the share ``uniform`` of what is kept. What is kept is the whole weight
if all of the best are. The host draws again and its token counts, so candidates beyond the best logits and
rounding only cost another run of a row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import (
    DRAW,
    DRAW_COLUMNS,
    DRAWN,
    DRAWN_BEFORE,
    INPUT_IDS,
    LOGITS,
    TOKEN_SOURCES,
    TOP_LOGITS,
    TOP_TOKEN_IDS,
)
from ...graph.edit import insert, shared_constant, static_size
from ...passes.base import GraphPass


class DrawTokensPass(GraphPass):
    """Add the inputs and the output above to a flat graph with ``TopLogitsPass``'s outputs.

    A part of a model that takes hidden states instead of tokens is not changed.
    """

    def rewrite(self, graph: ir.Graph) -> None:
        """Write both parts in standard operators; ``DrawTokens``, if it is there, computes the second."""
        values = {value.name: value for value in [*graph.inputs, *graph.outputs]}
        if not {INPUT_IDS, LOGITS, TOP_LOGITS, TOP_TOKEN_IDS} <= values.keys():
            return
        _read_drawn(graph, values[INPUT_IDS])
        _draw(graph, values[LOGITS], values[TOP_LOGITS], values[TOP_TOKEN_IDS])
        self.fired += 1


def _read_drawn(graph: ir.Graph, ids: ir.Value) -> None:
    """Replace negative token ids by drawn tokens."""
    readers = [(use.node, use.idx) for use in ids.uses()]
    first = next(node for node in graph if any(node is reader for reader, _ in readers))
    before = ir.val(DRAWN_BEFORE, ir.DataType.INT64, ["drawn"])
    sources = ir.val(TOKEN_SOURCES, ir.DataType.INT64, ["tokens", 1])
    graph.inputs.extend([sources, before])
    zero = shared_constant(graph, "draw.zero", np.array(0, np.int64))
    picked = insert(first, "Gather", [before, sources], {"axis": 0}).outputs[0]
    unknown = insert(first, "Less", [ids, zero]).outputs[0]
    known = insert(first, "Where", [unknown, picked, ids]).outputs[0]
    for node, index in readers:
        node.replace_input_with(index, known)


def _draw(graph: ir.Graph, logits: ir.Value, best: ir.Value, token_ids: ir.Value) -> None:
    controls = ir.val(DRAW, ir.DataType.FLOAT, ["wanted", len(DRAW_COLUMNS)])
    graph.inputs.append(controls)
    producer = best.producer()
    if producer is not None and producer.op_type == "DrawTokens":
        drawn = _fused(producer, controls)
    else:
        drawn = _written(graph, controls, logits, best, token_ids)
    drawn.name, drawn.type, drawn.shape = DRAWN, ir.TensorType(ir.DataType.INT64), ir.Shape(["wanted"])
    graph.outputs.append(drawn)


def _fused(node: ir.Node, controls: ir.Value) -> ir.Value:
    node.resize_inputs(2)
    node.replace_input_with(1, controls)
    node.resize_outputs(4)
    return node.outputs[3]


def _written(
    graph: ir.Graph, controls: ir.Value, logits: ir.Value, best: ir.Value, token_ids: ir.Value
) -> ir.Value:
    count = static_size(best, -1) or 0

    def constant(name: str, content: object, dtype: type) -> ir.Value:
        return shared_constant(graph, f"draw.{name}", np.array(content, dtype))

    def append(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        graph.append(node)
        return node.outputs[0]

    last, middle = constant("last", [-1], np.int64), constant("middle", [1], np.int64)
    columns = ir.node(
        "Split", [append("Unsqueeze", controls, middle)], {"axis": -1, "num_outputs": 5}, num_outputs=5
    )
    graph.append(columns)
    inverse, top_k, top_p, min_p, uniform = columns.outputs
    largest = append("Gather", best, constant("first", [0], np.int64), axis=-1)
    zero = constant("nothing", 0, np.float32)
    weights = append("Exp", append("Mul", append("Sub", best, largest), inverse))
    ranks = constant("ranks", range(count), np.float32)
    chosen = append("Where", append("Less", ranks, top_k), weights, zero)
    whole = append("ReduceSum", append("Exp", append("Mul", append("Sub", logits, largest), inverse)), last)
    # ``top_p`` is of what ``top_k`` keeps.
    limited = append("LessOrEqual", top_k, constant("count", count, np.float32))
    total = append("Where", limited, append("ReduceSum", chosen, last), whole)
    axis = constant("axis", -1, np.int64)
    before = append("Sub", append("CumSum", chosen, axis), chosen)
    nucleus = append("Where", append("Less", before, append("Mul", top_p, total)), chosen, zero)
    kept = append("Where", append("Less", weights, min_p), zero, nucleus)
    mass = append("CumSum", kept, axis)
    ends = append(
        "Equal", append("Gather", kept, constant("end_index", [count - 1], np.int64), axis=-1), zero
    )
    target = append("Mul", uniform, append("Where", ends, append("ReduceSum", kept, last), total))
    passed = append("Cast", append("LessOrEqual", mass, target), to=int(ir.DataType.FLOAT))
    place = append("Min", append("ReduceSum", passed, last), constant("end", count - 1, np.float32))
    index = append("Cast", place, to=int(ir.DataType.INT64))
    token = append("GatherElements", token_ids, index, axis=2)
    return append("Squeeze", token, constant("rest", [1, 2], np.int64))
