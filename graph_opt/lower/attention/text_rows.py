"""Join the texts of a batch to one row of tokens, so that nothing is computed for padding.

The inputs [batch, sequence] of an encoder become [1, tokens], the texts one behind the other. Attention
becomes carryall's ``PagedAttention``, which attends within each text; its caches hold the keys and values of
one layer at a time, so all layers share them. Everything else must process each token, or each text, alone: a
graph in which something else mixes tokens is refused and keeps its form.
"""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....contract import (
    ATTENTION_MASK,
    CONTEXT_LENGTH,
    INPUT_IDS,
    POSITION_IDS,
    TEXT_REDUCTIONS,
    TOKEN_TYPE_IDS,
)
from ....errors import GraphError, UnsupportedAttentionError
from ...analysis.decoder_inputs import find_input
from ...analysis.probe import Probe, inputs_of, rope_table
from ...graph.edit import (
    add_initializer,
    constant,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    static_size,
    weight,
)
from ...passes.base import GraphPass
from ...passes.remove_unused import RemoveUnusedNodesPass
from ..paged_kv import (
    AHEAD,
    BEGINS,
    BLOCK_SIZE,
    CACHE_TYPES,
    KEYS,
    LARGEST_HEAD,
    LAYOUT,
    PAST,
    TABLE,
    VALUES,
    row_bytes,
    text_cache,
)
from .native_attention import DOMAIN, OPERATOR
from .near_products import given, in_lanes, upstream
from .text_masks import TEXT_INPUTS, TextMask, text_masks

Floats = npt.NDArray[np.float32]
_CACHE = "float32"
_SHORT = 64  # tokens of a value that is evaluated, where the longest text is not known
_SHAPE = (1, "tokens")
_BY_TOKEN = frozenset(
    {"Abs", "Add", "Ceil", "Clip", "ConstantOfShape", "Cos", "Div", "Elu", "Equal", "Erf"}
    | {"Exp", "Expand", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSwish", "Identity"}
    | {"LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Pow"}
    | {"Reciprocal", "Relu", "Shape", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Swish"}
    | {"Tanh", "Where"}
)
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "Softmax"})
# Sizes are computed by these from other sizes.
_OF_SIZES = frozenset(
    {"Abs", "Add", "Cast", "Concat", "Div", "Identity", "Max", "Min", "Mod", "Mul", "Neg", "Reshape"}
    | {"Squeeze", "Sub", "Unsqueeze", "Where"}
)
# Reductions over the tokens of a text: what they begin with, and the name of the operation.
_REDUCTIONS = {"ReduceSum": (0.0, "add"), "ReduceMax": (float(np.finfo(np.float32).min), "max")}
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})


class TextRowsPass(GraphPass):
    """Rewrite the graph of an encoder.

    Raises:
        UnsupportedAttentionError: it has attention that the kernel does not compute, or mixes tokens
            elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._length = 0
        self._tables: dict[ir.Value, ir.Value] = {}
        self._made: set[ir.Node] = set()
        self._biases: list[tuple[Floats, ir.Value]] = []
        self._reductions: dict[str, str] = {}
        self._row: dict[str, ir.Value] = {}  # inputs that describe the texts

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, whose metadata says how long a text may be."""
        self._length = int(model.metadata_props.get(CONTEXT_LENGTH, 0))
        self._tables, self._made, self._biases, self._reductions = {}, set(), [], {}
        result = super().call(model)
        RemoveUnusedNodesPass().call(model)
        _replace_mask(model.graph)
        self._check(model.graph)
        if self._reductions:
            model.metadata_props[TEXT_REDUCTIONS] = json.dumps(self._reductions)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite positions, attention, first tokens and the inputs."""
        attentions = list(nodes_of(graph, "Attention"))
        if not attentions or find_input(graph, INPUT_IDS) is None:
            raise UnsupportedAttentionError("the graph has no attention as one operator")
        masks = text_masks(graph, attentions, self._length)
        reductions = [
            (node, x)
            for kind in _REDUCTIONS
            for node in nodes_of(graph, kind)
            if (x := _reduced_tokens(graph, node)) is not None
        ]
        self._replace_positions(graph)
        inputs = _row_inputs(graph)
        self._row.update(inputs)
        for node, mask in zip(attentions, masks, strict=True):
            self._replace_attention(graph, node, mask, inputs)
            self.fired += 1
        for node in list(nodes_of(graph, "CumSum")):
            self._replace_count(graph, node)
        for node in list(nodes_of(graph, "Gather")):
            if int_attribute(node, "axis", 0) == 1 and _is_zero(node.inputs[1]):
                self._replace_first(graph, node, inputs[BEGINS])
        for node, x in reductions:
            self._replace_reduction(graph, node, x)
        for value in graph.outputs:
            if value.shape is not None and len(value.shape) > 2:
                value.shape = ir.Shape([*_SHAPE, *list(value.shape)[2:]])
        _forget_shapes(graph)

    def _insert(
        self, before: ir.Node, op_type: str, inputs: list[ir.Value], **attributes: object
    ) -> ir.Value:
        node = insert(before, op_type, inputs, attributes)
        self._made.add(node)
        return node.outputs[0]

    def _replace_positions(self, graph: ir.Graph) -> None:
        """Make an input of the values that count the tokens of a text from 0 on."""
        positions = ir.val(POSITION_IDS, ir.DataType.INT64, _SHAPE)
        known = [
            (node, found)
            for node in graph
            if node.op_type in ("Expand", "Range", "Slice")
            and (found := _by_length(graph, node.outputs[0], self._length))
        ]
        for node, (rank, number) in known:
            if number is not None:
                self._replace_number(graph, node, rank, number)
                continue
            zero = shared_constant(graph, "axis_0", np.array([0], np.int64))
            new = self._insert(node, "Squeeze", [positions, zero]) if rank == 1 else positions
            for use in list(node.outputs[0].uses()):
                use.node.replace_input_with(use.idx, new)
        graph.inputs.append(positions)
        self._row = {POSITION_IDS: positions}

    def _replace_number(self, graph: ir.Graph, node: ir.Node, rank: int, number: int) -> None:
        """Make a value of any length that holds one number, such as the type of all tokens, a constant."""
        one = shared_constant(graph, f"number_{number}_{rank}", np.full((1,) * rank, number, np.int64))
        for use in list(node.outputs[0].uses()):
            if use.node.op_type not in ("Shape", "Size"):
                use.node.replace_input_with(use.idx, one)

    def _replace_attention(
        self, graph: ir.Graph, node: ir.Node, mask: TextMask, inputs: dict[str, ir.Value]
    ) -> None:
        heads, kv_heads, size = _head_sizes(node)
        query, key, value = node.inputs[:3]
        ropes = [self._rope(graph, x, count) for x, count in ((query, heads), (key, kv_heads))]
        cos: ir.Value | None = None
        sin, positions, interleaved = cos, cos, 0
        if ropes[0] is not None and ropes[0] == ropes[1]:
            cos, sin, interleaved = ropes[0]
            positions = find_input(graph, POSITION_IDS)
            query, key = (value.producer().inputs[0] for value in (query, key))  # type: ignore[union-attr]
        ahead, window = None if mask.causal else inputs[AHEAD], mask.window
        if window is not None and ahead is not None:
            most = shared_constant(graph, f"window_{window}", np.array(window, np.int32))
            ahead = self._insert(node, "Min", [ahead, most])
        caches = self._caches(graph, kv_heads, size)
        operands = [query, key, value, *caches, *(inputs[name] for name in (BEGINS, PAST, TABLE))]
        operands += [cos, sin, positions, None, None, ahead]
        if mask.near is not None:
            operands.append(self._near(graph, mask.near, heads))
        if mask.products is not None:
            tables = {"near_keys": mask.products.keys, "near_queries": mask.products.queries}
            operands += [None, *(add_initializer(graph, name, in_lanes(x)) for name, x in tables.items())]
        attributes = {
            "layout": LAYOUT,
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "head_size": size,
            "block_size": BLOCK_SIZE,
            "window": 0 if window is None else window + 1,
            "rotary_dim": 0 if cos is None else 2 * (static_size(cos, 1) or 0),
            "interleaved": interleaved,
            "cache_type": CACHE_TYPES[_CACHE],
            "scale": float_attribute(node, "scale", size**-0.5),
            "softcap": float_attribute(node, "softcap", 0.0),
            "reads_only": 0,
        }
        lowered = insert(node, OPERATOR, operands, attributes, domain=DOMAIN)
        lowered.name = node.name
        output = lowered.outputs[0]
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*_SHAPE, heads * size])
        replace(node.outputs[0], output)
        remove_unused(graph, node)

    def _caches(self, graph: ir.Graph, kv_heads: int, size: int) -> list[ir.Value]:
        """Return the caches of keys and values, which all layers with such heads share."""
        row = row_bytes(size, _CACHE)
        shape: list[int | str] = ["blocks", kv_heads, BLOCK_SIZE, row]
        caches = []
        for name in (text_cache(KEYS, kv_heads, row), text_cache(VALUES, kv_heads, row)):
            value = find_input(graph, name)
            if value is None:
                value = ir.val(name, ir.DataType.UINT8, shape)
                graph.inputs.append(value)
            caches.append(value)
        return caches

    def _near(self, graph: ir.Graph, near: Floats, heads: int) -> ir.Value:
        """Return the biases by distance as an initializer, which layers share."""
        for known, value in self._biases:
            if np.array_equal(known, near):
                return value
        table = np.ascontiguousarray(np.broadcast_to(near, (heads, near.shape[1])))
        value = add_initializer(graph, f"near_{len(self._biases)}", table)
        self._biases.append((near, value))
        return value

    def _rope(
        self, graph: ir.Graph, value: ir.Value | None, heads: int
    ) -> tuple[ir.Value, ir.Value, int] | None:
        """Return the tables of the rotary embedding of queries or keys, and whether it is interleaved."""
        node = None if value is None else value.producer()
        if node is None or node.op_type != "RotaryEmbedding" or len(node.inputs) != 3 or not self._length:
            return None
        partial = int_attribute(node, "rotary_embedding_dim", 0)
        if int_attribute(node, "num_heads", 0) != heads or len(node.outputs[0].uses()) != 1:
            return None
        tables = [self._table(graph, angle) for angle in node.inputs[1:]]
        width = None if tables[0] is None else static_size(tables[0], 1)
        if tables[0] is None or tables[1] is None or partial not in (0, 2 * (width or 0)):
            return None
        return tables[0], tables[1], int_attribute(node, "interleaved", 0)

    def _table(self, graph: ir.Graph, angle: ir.Value | None) -> ir.Value | None:
        if angle is None:
            return None
        if angle not in self._tables:
            try:
                table = rope_table(graph, angle, self._length)
            except GraphError:  # it depends on more than positions, so it stays an operator
                return None
            self._tables[angle] = add_initializer(graph, f"{angle.name}_by_position", table)
        return self._tables[angle]

    def _replace_count(self, graph: ir.Graph, node: ir.Node) -> None:
        """Count the tokens of each text from its first one on.

        A CumSum over the row goes on from text to text. What it had counted in front of a token's text is
        subtracted: the place of the text's first token is the token's place less its position.
        """
        axis, positions = constant(node.inputs[1]), find_input(graph, POSITION_IDS)
        x = node.inputs[0]
        plain = not any(int_attribute(node, name, 0) for name in ("exclusive", "reverse"))
        if axis is None or int(axis) != 1 or not plain or x is None or positions is None:
            return
        after = next(iter(node.outputs[0].uses())).node
        uses = list(node.outputs[0].uses())
        zero, one = (shared_constant(graph, f"number_{n}", np.array(n, np.int64)) for n in (0, 1))
        tokens = self._insert(after, "Size", [positions])
        flat = self._insert(
            after, "Squeeze", [positions, shared_constant(graph, "axis_0", np.array([0], np.int64))]
        )
        first = self._insert(after, "Sub", [self._insert(after, "Range", [zero, tokens, one]), flat])
        before = self._insert(after, "Sub", [node.outputs[0], x])
        own = self._insert(after, "Gather", [before, first], axis=1)
        counted = self._insert(after, "Sub", [node.outputs[0], own])
        counted.type, counted.shape = node.outputs[0].type or x.type, ir.Shape(_SHAPE)
        for use in uses:
            use.node.replace_input_with(use.idx, counted)
        self._made.add(node)

    def _replace_first(self, graph: ir.Graph, node: ir.Node, begins: ir.Value) -> None:
        """Take the first token of each text, [texts, size] of [1, tokens, size]."""
        x = node.inputs[0]
        if x is None:
            return
        zero = shared_constant(graph, "axis_0", np.array([0], np.int64))
        last = shared_constant(graph, "last", np.array([-1], np.int64))
        rows = self._insert(node, "Squeeze", [x, zero])
        firsts = self._insert(node, "Slice", [begins, zero, last])
        first = self._insert(node, "Gather", [rows, firsts], axis=0)
        replace(node.outputs[0], first)
        remove_unused(graph, node)

    def _replace_reduction(self, graph: ir.Graph, node: ir.Node, x: ir.Value) -> None:
        """Reduce the tokens of each text, [texts, ...] of [1, tokens, ...].

        Each token is added to, or compared with, the row of its text: the number of first tokens up to it.
        ScatterElements does so one token after the other; ScatterND of onnxruntime 1.32 loses some where
        several threads change one row. An output of the graph is reduced by who runs it, which is faster.
        """
        kept, output = int_attribute(node, "keepdims", 1), node.outputs[0]
        start, operation = _REDUCTIONS[node.op_type]
        if output.is_graph_output() and not output.uses() and not kept and output.shape is not None:
            new = self._insert(node, "Identity", [x])
            sizes = list(output.shape)[1:]
            name, new.type = output.name, output.type
            graph.outputs[graph.outputs.index(output)] = new
            remove_unused(graph, node)
            new.name, new.shape = name, ir.Shape([*_SHAPE, *sizes])
            self._reductions[str(name)] = operation
            return
        first_axis, second_axis = (
            shared_constant(graph, f"axis_{n}", np.array([n], np.int64)) for n in (0, 1)
        )
        rows = self._insert(node, "Squeeze", [x, first_axis])
        shape = self._insert(node, "Shape", [rows])
        sizes_of_row = self._insert(node, "Shape", [rows], start=1)
        places = self._insert(node, "Expand", [self._places(graph, node), shape])
        shape = self._insert(node, "Concat", [self._texts(graph, node), sizes_of_row], axis=0)
        empty = self._insert(node, "ConstantOfShape", [shape], value=ir.tensor(np.array([start], np.float32)))
        reduced = self._insert(node, "ScatterElements", [empty, places, rows], axis=0, reduction=operation)
        if kept:
            reduced = self._insert(node, "Unsqueeze", [reduced, second_axis])
        replace(output, reduced)
        remove_unused(graph, node)

    def _places(self, graph: ir.Graph, node: ir.Node) -> ir.Value:
        """Return the number of each token's text, int64 [tokens, 1]."""
        zero, one = (shared_constant(graph, f"number_{n}", np.array(n, np.int64)) for n in (0, 1))
        axes = [shared_constant(graph, f"axis_{n}", np.array([n], np.int64)) for n in (0, 1)]
        first = self._insert(node, "Equal", [self._row[POSITION_IDS], zero])
        first = self._insert(node, "Cast", [first], to=ir.DataType.INT64)
        count = self._insert(node, "CumSum", [self._insert(node, "Squeeze", [first, axes[0]]), zero])
        return self._insert(node, "Unsqueeze", [self._insert(node, "Sub", [count, one]), axes[1]])

    def _texts(self, graph: ir.Graph, node: ir.Node) -> ir.Value:
        """Return the number of texts, int64 [1]."""
        one = shared_constant(graph, "axis_1", np.array([1], np.int64))
        return self._insert(node, "Sub", [self._insert(node, "Shape", [self._row[BEGINS]]), one])

    def _check(self, graph: ir.Graph) -> None:
        """Refuse a graph in which a node other than attention mixes tokens."""
        for node in graph:
            if node in self._made or node.domain == DOMAIN or not any(map(inputs_of, given(node))):
                continue
            if not _is_separate(node):
                raise UnsupportedAttentionError(
                    f"{node.op_type} {node.name} may mix the tokens of several texts"
                )


def _replace_mask(graph: ir.Graph) -> None:
    """Make ones of the input ``attention_mask``, and remove it: no token is padding."""
    mask, ids = find_input(graph, ATTENTION_MASK), find_input(graph, INPUT_IDS)
    if mask is None or ids is None:
        return
    if mask.uses():
        shape = insert(next(iter(graph)), "Shape", [ids])
        ones = ir.node("ConstantOfShape", shape.outputs, {"value": ir.tensor(np.array([1], np.int64))})
        graph.insert_after(shape, ones)
        for use in list(mask.uses()):
            use.node.replace_input_with(use.idx, ones.outputs[0])
    graph.inputs.remove(mask)


def _row_inputs(graph: ir.Graph) -> dict[str, ir.Value]:
    """Give the tokens their new shape, and return the inputs that describe the texts."""
    for name in (INPUT_IDS, TOKEN_TYPE_IDS):
        value = find_input(graph, name)
        if value is not None:
            value.shape = ir.Shape(_SHAPE)
    shapes = {
        BEGINS: ["texts_and_one"],
        PAST: ["texts"],
        TABLE: ["texts", "blocks_of_text"],
        AHEAD: ["tokens"],
    }
    inputs = {name: ir.val(name, ir.DataType.INT32, shape) for name, shape in shapes.items()}
    graph.inputs.extend(inputs.values())
    return inputs


def _head_sizes(node: ir.Node) -> tuple[int, int, int]:
    """Return the numbers of heads of queries and of keys, and the size of a head.

    Raises:
        UnsupportedAttentionError: the kernel has no such heads.
    """
    heads, kv_heads = int_attribute(node, "q_num_heads", 0), int_attribute(node, "kv_num_heads", 0)
    widths = [static_size(value, 2) for value in node.inputs[:3]]
    if not heads or not kv_heads or None in widths or not widths[0]:
        raise UnsupportedAttentionError(f"attention {node.name} has no known heads")
    size = widths[0] // heads
    if size > LARGEST_HEAD or widths[1] != kv_heads * size or widths[2] != kv_heads * size:
        raise UnsupportedAttentionError(f"attention {node.name} has heads of {size}, or of different sizes")
    return heads, kv_heads, size


def _by_length(graph: ir.Graph, value: ir.Value, longest: int) -> tuple[int, int | None] | None:
    """Return what a value along [sequence] or [batch, sequence] is, if only the length of texts decides it.

    Args:
        graph: the graph.
        value: the value.
        longest: tokens of the longest text; 0 if that is not known.

    Returns:
        Its rank, and the integer that it holds everywhere; None in place of it for one that counts 0, 1, ...
        None if it is something else.
    """
    sources = {str(source.name) for source in inputs_of(value)}
    if not sources or sources - set(TEXT_INPUTS):
        return None
    try:
        probe = Probe(graph, value)
    except GraphError:
        return None
    rank, held = 0, list[int | None]()
    for length in (5, 9, longest or _SHORT):
        ones = np.ones((2, length), np.int64)
        try:
            found = probe(dict.fromkeys(TEXT_INPUTS, ones))
        except GraphError:
            return None
        if found.shape not in ((length,), (1, length), (2, length)) or found.dtype != np.int64:
            return None
        counts = bool((found == np.arange(length)).all())
        if not counts and (found != found.flat[0]).any():
            return None
        rank = found.ndim
        held.append(None if counts else int(found.flat[0]))
    return (rank, held[0]) if len(set(held)) == 1 else None


def _reduced_tokens(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Return what a reduction over the tokens of texts reads, [batch, sequence, ...]; None of another one."""
    ids, x = find_input(graph, INPUT_IDS), node.inputs[0]
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if ids is None or x is None or ids.shape is None or x.shape is None or len(x.shape) < 2 or axes is None:
        return None
    along = not isinstance(x.shape[1], int) and x.shape[1] == ids.shape[1]
    return x if along and axes.reshape(-1).tolist() == [1] else None


def _is_zero(value: ir.Value | None) -> bool:
    number = constant(value)
    return number is not None and number.shape == () and int(number) == 0


def _is_fixed(value: ir.Value | None) -> bool:
    return value is not None and not inputs_of(value)


def _is_one_number(value: ir.Value | None) -> bool:
    tensor = weight(value)
    return value is None or (tensor is not None and tensor.size == 1)


def _forget_shapes(graph: ir.Graph) -> None:
    """Forget the shapes of values with the axes of the batch; they are inferred again."""
    for node in graph:
        for value in node.outputs:
            if node.domain != DOMAIN and not value.is_graph_output() and value.shape != _SHAPE:
                value.shape = None


def _is_size(value: ir.Value) -> bool:
    """Return whether a value is computed from the size of another one."""
    return any(node.op_type in ("Shape", "Size") for node in upstream(value, _OF_SIZES))


def _is_separate(node: ir.Node) -> bool:
    """Return whether a node computes each token of [1, tokens, ...] or each text of [texts, ...] alone."""
    if node.domain:
        return False
    if node.op_type in _BY_TOKEN:
        return True
    first = node.inputs[0]
    match node.op_type:
        case "Cast":
            # The sizes of the row are not those of a text. Integers may be sizes of further values, which are
            # of the row as well; numbers to compute with may not.
            return int_attribute(node, "to", 0) in _INTEGERS or first is None or not _is_size(first)
        case "DequantizeLinear":
            return all(map(_is_one_number, node.inputs[1:]))
        case "Split":
            return int_attribute(node, "axis", 0) == -1
        case "MatMul":
            return not inputs_of(node.inputs[1]) if node.inputs[1] is not None else False
        case "Gemm":
            return not int_attribute(node, "transA", 0) and weight(node.inputs[1]) is not None
        case "Gather":
            axis = int_attribute(node, "axis", 0)
            return (axis == 0 and _is_fixed(first)) or (axis > 1 and _is_fixed(node.inputs[1]))
        case "RotaryEmbedding":
            return int_attribute(node, "num_heads", 0) > 0
        case "Reshape":
            shape = constant(node.inputs[1])
            return shape is not None and len(shape) > 2 and shape[0] == 0 and shape[1] == 0
        case "Unsqueeze":
            axes = constant(node.inputs[1])
            return axes is not None and all(axis == -1 or axis >= 2 for axis in axes.reshape(-1))
        case _:
            return node.op_type in _NORMS and int_attribute(node, "axis", -1) == -1
