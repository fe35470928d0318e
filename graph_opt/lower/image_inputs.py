"""Let rows of ``image_states`` replace the embeddings of tokens, for a decoder that sees pictures.

    x = embedding(input_ids)   ->   x = Where(image_rows >= 0, Gather(image_states, image_rows), x)
    angles = position_ids * f  ->   angles[j] = rope_positions[axis of j] * f[j]
    x behind layer i           ->   x + Gather(further columns of image_states, image_rows)
    keys <= queries            ->   Or(this, keys <= queries + image_ahead)

``image_states`` [rows, hidden] holds what ``vision.onnx`` returns, and zeros in its last row;
``image_rows`` has the shape of ``input_ids`` and the row of each position, -1 for text. So a step without
pictures costs one Where, and the token of a place for a picture that the model writes is a plain embedding.
The second form is for decoders whose metadata has ``ROPE_AXES`` (M-RoPE, https://arxiv.org/abs/2409.12191),
the third for those with ``DEEP_STATES`` (DeepStack, https://arxiv.org/abs/2406.04334), the last for those
with ``AHEAD_WINDOWS`` (Gemma 3, https://arxiv.org/abs/2503.19786). The stored graph stays a decoder of text,
as it does for LoRA adapters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...contract import (
    AHEAD_WINDOWS,
    DEEP_STATES,
    ENCODER_STATES,
    IMAGE_AHEAD,
    IMAGE_PAD,
    IMAGE_ROWS,
    IMAGE_STATES,
    INPUT_IDS,
    POSITION_IDS,
    ROPE_AXES,
    ROPE_POSITIONS,
    SEEN_EMBEDDING,
)
from ...errors import GraphError
from ..analysis.decoder_inputs import find_input
from ..analysis.known_masks import integers_upstream
from ..analysis.probe import mask_meaning
from ..graph.edit import insert, nodes_of, remove_unused, replace, shared_constant, static_size
from ..passes.base import GraphPass
from ..passes.shape_inference import ShapeInferencePass

_SHORT = 64  # tokens of a probe of masks without windows
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class ImageInputsPass(GraphPass):
    """Add the inputs to a portable decoder. Must run before a lowering.

    Raises:
        GraphError: the graph does not look its tokens up in one table of known width, or lacks what its
            metadata names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._axes: list[int] = []
        self._deep: list[str] = []
        self._windows: list[int | None] = []
        self._place: str | None = None
        self._pad: int | None = None

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the main graph, with known shapes; not one that attends to an encoder's rows."""
        if find_input(model.graph, ENCODER_STATES) is not None:
            return ir.passes.PassResult(model, False)
        ShapeInferencePass()(model)
        self._axes = json.loads(model.metadata_props.get(ROPE_AXES, "[]"))
        self._deep = json.loads(model.metadata_props.get(DEEP_STATES, "[]"))
        self._windows = json.loads(model.metadata_props.get(AHEAD_WINDOWS, "[]"))
        self._place = model.metadata_props.get(SEEN_EMBEDDING)
        pad = model.metadata_props.get(IMAGE_PAD)
        self._pad = None if pad is None else int(pad)
        return super().call(model)

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the embeddings where a row is given."""
        embedded, width = _embedding(graph, self._place)
        columns = width * (1 + len(self._deep))
        states = ir.val(IMAGE_STATES, ir.DataType.FLOAT, ir.Shape(["image_rows", columns]))
        ids = find_input(graph, INPUT_IDS)
        rows = ir.val(IMAGE_ROWS, ir.DataType.INT64, None if ids is None else ids.shape)
        graph.inputs.extend([states, rows])
        # The users are listed before Where becomes one of them. All nodes stand in front of the first user
        # and not behind the embedding, since inputs of the graph and constants are known there as well.
        users = [(use.node, use.idx) for use in embedded.uses()]
        readers = {node for node, _ in users}
        lookup = next(node for node in graph if node in readers)
        zero = shared_constant(graph, "images.zero", np.array(0, np.int64))
        last = shared_constant(graph, "images.last_axis", np.array([-1], np.int64))
        given = insert(lookup, "GreaterOrEqual", [rows, zero]).outputs[0]
        column = insert(lookup, "Unsqueeze", [given, last]).outputs[0]
        seen = insert(lookup, "Gather", [states, rows], {"axis": 0}).outputs[0]
        if embedded.dtype not in (None, ir.DataType.FLOAT):
            seen = insert(lookup, "Cast", [seen], {"to": int(embedded.dtype)}).outputs[0]
        parts = [seen]
        if self._deep:
            count = 1 + len(self._deep)
            sizes = shared_constant(graph, "images.widths", np.full(count, width, np.int64))
            parts = list(insert(lookup, "Split", [seen, sizes], {"axis": -1}, num_outputs=count).outputs)
        chosen = insert(lookup, "Where", [column, parts[0], embedded])
        for node, index in users:
            node.replace_input_with(index, chosen.outputs[0])
        chosen.outputs[0].type, chosen.outputs[0].shape = embedded.type, embedded.shape
        if self._pad is not None and ids is not None:
            _look_up_padding(graph, embedded, ids, rows, self._pad)
        for name, part in zip(self._deep, parts[1:], strict=True):
            _add_to(graph, name, part)
        if self._axes:
            _turn_with_axes(graph, self._axes)
        if self._windows:
            _see_ahead(graph, self._windows)
        self.fired += 1


def _named(graph: ir.Graph, name: str) -> ir.Value:
    """Return the value that the metadata names."""
    value = next((node.outputs[0] for node in graph if node.outputs[0].name == name), None)
    if value is None:
        raise GraphError(f"the graph has no value '{name}', which pictures change; export the model again")
    return value


def _look_up_padding(graph: ir.Graph, embedded: ir.Value, ids: ir.Value, rows: ir.Value, pad: int) -> None:
    """Let look-ups of tokens, except that of ``embedded``, find ``pad`` where ``rows`` are of pictures."""
    lookup_nodes, waiting = set[ir.Node](), [embedded.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in lookup_nodes:
            lookup_nodes.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    zero, token = (
        shared_constant(graph, f"images.{name}", np.array(number, np.int64))
        for name, number in (("zero", 0), ("pad", pad))
    )
    for use in list(ids.uses()):
        if use.node.op_type.startswith("Gather") and use.node not in lookup_nodes:
            seen = insert(use.node, "GreaterOrEqual", [rows, zero]).outputs[0]
            use.node.replace_input_with(use.idx, insert(use.node, "Where", [seen, token, ids]).outputs[0])


def _see_ahead(graph: ir.Graph, windows: Sequence[int | None]) -> None:
    """Let tokens of a picture see those behind them, in the attentions whose masks have one of the windows.

    Raises:
        GraphError: the meaning of a mask is unknown.
    """
    ids = find_input(graph, INPUT_IDS)
    ahead = ir.val(IMAGE_AHEAD, ir.DataType.INT32, None if ids is None else ids.shape)
    graph.inputs.append(ahead)
    zero = shared_constant(graph, "images.visible", np.array(0, np.float32))
    changed: dict[ir.Value, ir.Value] = {}
    for node in nodes_of(graph, "Attention"):
        mask = node.inputs[3]
        if mask is None or mask.dtype not in (None, ir.DataType.FLOAT):
            raise GraphError(f"attention {node.name} has no mask of float32, which pictures change")
        if mask not in changed:
            length = max([_SHORT, *integers_upstream(mask), *(window or 0 for window in windows)]) + 2
            meaning = mask_meaning(graph, mask, length)
            if isinstance(meaning, str):
                raise GraphError(f"attention {node.name} has a mask that pictures cannot change: {meaning}")
            changed[mask] = mask
            if meaning.window in windows:
                behind = _behind(graph, node, mask, ahead)
                changed[mask] = insert(node, "Where", [behind, zero, mask]).outputs[0]
                changed[mask].dtype = ir.DataType.FLOAT
        node.replace_input_with(3, changed[mask])


def _behind(graph: ir.Graph, node: ir.Node, mask: ir.Value, ahead: ir.Value) -> ir.Value:
    """Return which keys are behind a query and counted by ``ahead``, bool [batch, 1, sequence, total].

    Queries are the last positions of the keys of ``mask`` [..., sequence, total].
    """

    def op(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return insert(node, kind, list(inputs), attributes).outputs[0]

    first, one = (shared_constant(graph, f"images.{n}", np.array(n, np.int64)) for n in (0, 1))
    column = shared_constant(graph, "images.column", np.array([1], np.int64))
    axes = shared_constant(graph, "images.mask_axes", np.array([1, 3], np.int64))
    size = op("Shape", mask, start=-2)
    sequence, total = (op("Gather", size, index, axis=0) for index in (first, one))
    keys = op("Range", first, total, one)
    queries = op("Unsqueeze", op("Range", op("Sub", total, sequence), total, one), column)
    last = op("Add", queries, op("Unsqueeze", op("Cast", ahead, to=int(ir.DataType.INT64)), axes))
    return op("And", op("Greater", keys, queries), op("LessOrEqual", keys, last))


def _add_to(graph: ir.Graph, name: str, part: ir.Value) -> None:
    """Add ``part`` to the value ``name``. Rows of text look up zeros."""
    value = _named(graph, name)
    users = [(use.node, use.idx) for use in value.uses()]
    readers = {node for node, _ in users}
    added = insert(next(node for node in graph if node in readers), "Add", [value, part])
    for node, index in users:
        node.replace_input_with(index, added.outputs[0])
    added.outputs[0].type, added.outputs[0].shape = value.type, value.shape


def _turn_with_axes(graph: ir.Graph, axes: list[int]) -> None:
    """Let each frequency turn with its own axis of positions.

    What every rope multiplies its frequencies by, float32 [batch, sequence, 1], becomes [batch, sequence,
    frequencies]: equal numbers for text, so its angles stay equal to the bit.
    """
    ids = find_input(graph, POSITION_IDS)
    casts = [] if ids is None else [use.node for use in ids.uses() if use.node.op_type == "Cast"]
    columns = [
        use.node for cast in casts for use in cast.outputs[0].uses() if use.node.op_type == "Unsqueeze"
    ]
    if not columns:
        raise GraphError("the graph does not compute its rope from positions; export the model again")
    shape = None if ids is None or ids.shape is None else [max(axes) + 1, *ids.shape]
    positions = ir.val(ROPE_POSITIONS, ir.DataType.INT64, None if shape is None else ir.Shape(shape))
    graph.inputs.append(positions)
    first = next(node for node in graph if node in columns)
    chosen = shared_constant(graph, "images.rope_axes", np.array(axes, np.int64))
    numbers = insert(first, "Cast", [positions], {"to": int(ir.DataType.FLOAT)}).outputs[0]
    numbers = insert(first, "Gather", [numbers, chosen], {"axis": 0}).outputs[0]
    numbers = insert(first, "Transpose", [numbers], {"perm": [1, 2, 0]}).outputs[0]
    for column in columns:
        replace(column.outputs[0], numbers)
        remove_unused(graph, column)
    numbers.shape = None if ids is None or ids.shape is None else ir.Shape([*ids.shape, len(axes)])


def _embedding(graph: ir.Graph, name: str | None) -> tuple[ir.Value, int]:
    """Return the embeddings of the tokens, [batch, sequence, hidden], and the hidden size.

    They are the value ``name``, or what is looked up by token.
    """
    ids = find_input(graph, INPUT_IDS)
    lookups = [] if ids is None else [use.node for use in ids.uses() if use.node.op_type.startswith("Gather")]
    values = [node.outputs[0] for node in lookups] if name is None else [_named(graph, name)]
    width = static_size(values[0], -1) if len(values) == 1 else None
    if width is None or values[0].dtype not in (None, *_FLOATS):
        raise GraphError(
            f"pictures need a decoder that looks its tokens up in one table; this one has {len(values)} "
            "look-ups of its input_ids, or a table of unknown width"
        )
    return values[0], width
