"""Lower attention of towers of pictures to carryall's ``PagedAttention``, which needs no copies of groups.

``groups`` and ``windows`` of ``vision.onnx`` say which patches attend to each other. Here the patches of a
group lie one behind the other, so that a group is a row of ``PagedAttention`` that sees all of itself:
queries, keys and values are read where the products wrote them, with the 2-D rope applied on the way. All
layers share their caches.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....contract import GROUPS, PATCH_COS, PATCH_SIN, PIXELS, WINDOWS
from ...analysis.decoder_inputs import find_input
from ...graph.edit import (
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    static_size,
)
from ...passes.base import GraphPass
from ..paged_kv import (
    AHEAD,
    BEGINS,
    BLOCK_SIZE,
    KEYS,
    LARGEST_HEAD,
    LAYOUT,
    PAST,
    ROUNDED_QUERIES,
    TABLE,
    VALUES,
    row_bytes,
    rows_input,
    text_cache,
)
from .native_attention import DOMAIN, OPERATOR

_MASK = 3
_ROWS: dict[str, list[int | str]] = {
    BEGINS: ["groups_and_one"],
    PAST: ["groups"],
    TABLE: ["groups", "blocks"],
    AHEAD: ["patches"],
}


class PatchRowsPass(GraphPass):
    """Rewrite all attention of a tower over groups, or none.

    The caller must then give the inputs ``rows_input(GROUPS, ...)`` and, with windows,
    ``rows_input(WINDOWS, ...)`` in place of the groups, and patches in an order in which the members of each
    group lie one behind the other.

    Args:
        cache_type: of ``PagedAttention``: queries, keys and values are rounded to it.
    """

    def __init__(self, cache_type: str) -> None:
        super().__init__()
        self._cache_type = cache_type

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention of the graph, if it is all over groups."""
        attentions = list(nodes_of(graph, "Attention"))
        found = [_grouped(graph, node) for node in attentions]
        for node, each in zip(attentions, found, strict=True):
            if isinstance(each, str):
                self.refuse(node, each)
        groups = [each for each in found if not isinstance(each, str)]
        if not groups or len(groups) < len(found):
            return
        numbers = _numbers(graph)
        for node, (name, after) in zip(attentions, groups, strict=True):
            self._replace(graph, node, name, after, numbers)
            self.fired += 1
        for value in list(graph.inputs):
            if not value.uses() and not value.is_graph_output():
                graph.inputs.remove(value)

    def _replace(self, graph: ir.Graph, node: ir.Node, name: str, after: ir.Node, numbers: ir.Value) -> None:
        heads = int_attribute(node, "q_num_heads", 0)
        query, key, value = (_source(each) for each in node.inputs[:_MASK])
        width = static_size(value, 1) or 0
        size = width // heads
        cos, sin = (find_input(graph, each) for each in (PATCH_COS, PATCH_SIN))
        turned = [_turned(each, heads, cos, sin) for each in (query, key)]
        rotates = None not in turned
        if rotates:
            query, key = turned
        rows = {
            each: _input(graph, rows_input(name, each), ir.DataType.INT32, shape)
            for each, shape in _ROWS.items()
        }
        caches = self._caches(graph, heads, size)
        angles = [cos, sin, numbers] if rotates else [None] * 3
        operands = [query, key, value, *caches, *(rows[each] for each in (BEGINS, PAST, TABLE)), *angles]
        attributes = {
            "layout": LAYOUT,
            "num_heads": heads,
            "kv_num_heads": heads,
            "head_size": size,
            "block_size": BLOCK_SIZE,
            "window": 0,
            "rotary_dim": 2 * (static_size(cos, 1) or 0) if rotates else 0,
            "interleaved": 0,
            # Queries of 8 bits (arXiv:2410.02367) take half of the products of 16, weights keep 16; queries
            # of one bfloat16 take half of the products of two.
            "cache_type": ROUNDED_QUERIES[self._cache_type],
            "scale": float_attribute(node, "scale", size**-0.5),
            "softcap": float_attribute(node, "softcap", 0.0),
            "reads_only": 0,
        }
        lowered = insert(node, OPERATOR, [*operands, None, None, rows[AHEAD]], attributes, domain=DOMAIN)
        lowered.name = node.name
        output = lowered.outputs[0]
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["patches", width])
        replace(after.outputs[0], output)
        remove_unused(graph, after)

    def _caches(self, graph: ir.Graph, heads: int, size: int) -> list[ir.Value]:
        """Return the inputs for keys and values, which all layers share."""
        row = row_bytes(size, self._cache_type)
        shape: list[int | str] = ["blocks", heads, BLOCK_SIZE, row]
        return [
            _input(graph, text_cache(name, heads, row), ir.DataType.UINT8, shape) for name in (KEYS, VALUES)
        ]


def _grouped(graph: ir.Graph, node: ir.Node) -> tuple[str, ir.Node] | str:
    """Return the groups of an attention and the node behind it, which orders by patches; or a misfit."""
    heads = int_attribute(node, "q_num_heads", 0)
    if not heads or heads != int_attribute(node, "kv_num_heads", 0):
        return "its heads share keys, or are not known"
    gathers = [None if value is None else value.producer() for value in node.inputs[:_MASK]]
    members = {each.inputs[1] for each in gathers if each is not None and each.op_type == "Gather"}
    if None in gathers or len(members) != 1:
        return "its queries, keys and values are not those of groups"
    names = [name for name in (GROUPS, WINDOWS) if _is_of(members, find_input(graph, name))]
    width = static_size(_source(node.inputs[2]), 1)
    if not names or any(static_size(_source(value), 1) != width for value in node.inputs[:_MASK]):
        return "it is not over groups, or queries and values differ in width"
    if not width or width % heads or width // heads > LARGEST_HEAD:
        return f"the kernel has no heads of {(width or 0) // heads} elements"
    reshaped = _sole_reader(node.outputs[0])
    after = None if reshaped is None or reshaped.op_type != "Reshape" else _sole_reader(reshaped.outputs[0])
    if after is None or after.op_type != "Gather":
        return "its results are not put in the order of patches"
    return names[0], after


def _is_of(members: set[ir.Value | None], groups: ir.Value | None) -> bool:
    """Whether members of groups are those of an input, with 0 in place of -1."""
    sources = {None if value is None else value.producer() for value in members}
    return groups is not None and all(
        node is not None and node.op_type == "Max" and groups in node.inputs for node in sources
    )


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return what groups were gathered from."""
    node = None if value is None else value.producer()
    return None if node is None else node.inputs[0]


def _turned(
    value: ir.Value | None, heads: int, cos: ir.Value | None, sin: ir.Value | None
) -> ir.Value | None:
    """Return what a 2-D rope was applied to; None if there is none that the kernel applies."""
    squeeze = None if value is None else value.producer()
    whole = None if squeeze is None or squeeze.op_type != "Squeeze" else squeeze.inputs[0]
    node = None if whole is None else whole.producer()
    if node is None or node.op_type != "RotaryEmbedding" or cos is None or sin is None:
        return None
    plain = not int_attribute(node, "interleaved", 0) and not int_attribute(node, "rotary_embedding_dim", 0)
    alone = [_unsqueezed(each) for each in node.inputs]
    if int_attribute(node, "num_heads", 0) != heads or not plain or alone[1:] != [cos, sin]:
        return None
    return alone[0]


def _unsqueezed(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Unsqueeze" else None


def _sole_reader(value: ir.Value) -> ir.Node | None:
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    """Return an input of the graph, made if there is none yet."""
    value = find_input(graph, name)
    if value is None:
        value = ir.val(name, dtype, shape)
        graph.inputs.append(value)
    return value


def _numbers(graph: ir.Graph) -> ir.Value:
    """Return the numbers of all patches, int64 [patches]: rows of their angles."""
    pixels = find_input(graph, PIXELS)
    first = next(iter(graph))
    axis, zero, one = (
        shared_constant(graph, f"patch_number_{name}", np.array(number, np.int64))
        for name, number in (("axis", [0]), ("first", 0), ("step", 1))
    )
    size = insert(first, "Shape", [pixels], {"start": 0, "end": 1}).outputs[0]
    count = insert(first, "Squeeze", [size, axis]).outputs[0]
    return insert(first, "Range", [zero, count, one]).outputs[0]
