"""Give PagedAttention the form of carryall's own CPU kernel: attributes, cache bytes, packed operands.

The operator and its caches: ``attention_operator.cpp`` and ``attention.h`` in ``providers/native/sources``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ....contract import POSITION_IDS, SLIDING_WINDOWS
from ....errors import UnsupportedAttentionError
from ...graph.edit import (
    add_initializer,
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
from ...graph.graph_facts import quantized_bits
from ...graph.lazy import lazy, shape_of
from ...passes.base import GraphPass
from ..paged_kv import (
    BLOCK_SIZE,
    CACHE_TYPE,
    CACHE_TYPES,
    COMPRESSED,
    LARGEST_HEAD,
    LAYOUT,
    TABLE,
    row_bytes,
    table_input,
)
from .kv_int8 import CacheScales
from .shared_cache import reads_only

DOMAIN, OPERATOR = "carryall", "PagedAttention"
_SINKS = 11  # index of the operator's input; slopes and ahead follow


class NativeAttentionPass(GraphPass):
    """Rewrite every PagedAttention of ``pipelines/native_paged.py``'s first form.

    Args:
        cache_type: a key of ``CACHE_TYPES``, or ``auto``.
        scales: ``auto`` is int8 if it is not empty; else int8 if weights have at most 4 bits, bfloat16 if
            they have 8, float32 if none is quantized: the cache adds about 1 % to what the weights lose.

    Raises:
        UnsupportedAttentionError: the kernel has no such head size, or no attention is one operator.
    """

    def __init__(self, cache_type: str, scales: CacheScales) -> None:
        super().__init__()
        self._asked, self._scales = cache_type, scales
        self._type = cache_type
        self._windows: dict[str, int] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``; store the type of the caches and the sliding windows in its metadata."""
        self._windows = {}
        if self._asked == "auto":
            self._type = "int8" if self._scales.by_cache else _type_of(quantized_bits(model.graph))
            if self._type == "int8" and COMPRESSED in model.metadata_props:
                self._type = "bfloat16"  # one scale would be for the compressed and the rotated elements
        result = super().call(model)
        if not result.modified:
            raise UnsupportedAttentionError(
                "KV in blocks needs attention as one operator; the graph has none"
            )
        model.metadata_props[CACHE_TYPE] = self._type
        model.metadata_props[SLIDING_WINDOWS] = json.dumps(self._windows)
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes, then the types of the cache inputs.

        Caches of which different windows are read have a block table for each window, as inputs of the graph,
        so that KV behind one window can be freed while other layers keep theirs.
        """
        positions = next((value for value in graph.inputs if value.name == POSITION_IDS), None)
        nodes = list(nodes_of(graph, OPERATOR, DOMAIN))
        if not nodes:
            return
        windows = _windows(nodes)
        tables = _tables(graph, windows)
        sizes: dict[ir.Value | None, int] = {}
        numbers: ir.Value | None = None
        for node in nodes:
            query, key, value, keys, values, begins, past, cos, sin, _, *optional = node.inputs
            table = tables[windows[keys]]
            size = static_size(keys, 3) or 0
            if size > LARGEST_HEAD:
                raise UnsupportedAttentionError(
                    f"attention {node.name} has heads of {size}; carryall's kernel has up to {LARGEST_HEAD}"
                )
            shared = reads_only(node)
            operands = [query, *([None] * 2 if shared else [key, value]), keys, values, begins, past, table]
            if cos is not None:
                if weight(cos) is None and numbers is None:
                    numbers = _numbers(graph, positions)
                places = numbers if weight(cos) is None else positions
                operands += [_float(graph, cos), _float(graph, sin), places]
            if optional:  # sinks, slopes, ahead
                operands += [None] * (_SINKS - len(operands))
                operands += [None if value is None else _float(graph, value) for value in optional]
            attributes = self._attributes(node, size, cos) | {"reads_only": int(shared)}
            lowered = insert(node, OPERATOR, operands, attributes, domain=DOMAIN)
            lowered.name = node.name
            replace(node.outputs[0], lowered.outputs[0])
            remove_unused(graph, node)
            sizes |= dict.fromkeys((keys, values), size)
            self.fired += 1
        for cache, size in sizes.items():  # last, because several nodes may read a cache
            self._retype(cache, size, windows[cache])

    def _attributes(self, node: ir.Node, size: int, cos: ir.Value | None) -> dict[str, int | float]:
        return {
            "layout": LAYOUT,
            "num_heads": int_attribute(node, "num_heads", 0),
            "kv_num_heads": int_attribute(node, "kv_num_heads", 0),
            "head_size": size,
            "block_size": BLOCK_SIZE,
            "window": _window(node),
            "rotary_dim": 0 if cos is None else 2 * (static_size(cos, 1) or 0),
            "interleaved": int_attribute(node, "rotary_interleaved", 0),
            "cache_type": CACHE_TYPES[self._type],
            "scale": float_attribute(node, "scale", 1.0),
            "softcap": float_attribute(node, "softcap", 0.0),
        }

    def _retype(self, cache: ir.Value | None, size: int, window: int) -> None:
        if cache is None or cache.shape is None:
            return
        heads = cache.shape[1]
        cache.type = ir.TensorType(ir.DataType.UINT8)
        cache.shape = ir.Shape(["blocks", heads, BLOCK_SIZE, row_bytes(size, self._type)])
        if window:
            self._windows[str(cache.name)] = window


def _window(node: ir.Node) -> int:
    """Return the sliding window of a PagedAttention of the first form; 0 is none."""
    return max(0, int_attribute(node, "local_window_size", -1))


def _windows(nodes: Sequence[ir.Node]) -> dict[ir.Value | None, int]:
    """Return the window of each cache: the largest of the nodes that read it, 0 if one of them has none."""
    readers: dict[ir.Value | None, list[int]] = {}
    for node in nodes:
        for cache in node.inputs[3:5]:
            readers.setdefault(cache, []).append(_window(node))
    return {cache: max(found) if all(found) else 0 for cache, found in readers.items()}


def _tables(graph: ir.Graph, windows: Mapping[ir.Value | None, int]) -> dict[int, ir.Value]:
    """Return the block table of the caches of each window; the graph gets those that it lacks."""
    first = next(value for value in graph.inputs if value.name == TABLE)
    kinds = dict.fromkeys(windows.values())
    if len(kinds) == 1:
        return dict.fromkeys(kinds, first)
    tables = {
        window: first if not window else ir.val(table_input(window), ir.DataType.INT32, first.shape)
        for window in kinds
    }
    place = graph.inputs.index(first)
    graph.inputs[place : place + 1] = list(tables.values())
    return tables


def _type_of(bits: frozenset[int]) -> str:
    """Return the type of the cache for weights with these numbers of bits."""
    if not bits:
        return "float32"
    return "int8" if min(bits) <= 4 else "bfloat16"


def _numbers(graph: ir.Graph, positions: ir.Value | None) -> ir.Value:
    """Return the number of each token of a step, int64 [tokens]: rows of angles that are not in a table."""
    first = graph[0]
    zero, one = (shared_constant(graph, f"paged.{number}", np.array(number, np.int64)) for number in (0, 1))
    numbers = insert(first, "Range", [zero, insert(first, "Size", [positions]).outputs[0], one]).outputs[0]
    numbers.type, numbers.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["tokens"])
    return numbers


def _float(graph: ir.Graph, table: ir.Value | None) -> ir.Value | None:
    """Return a rotary table in float32."""
    tensor = weight(table)
    if tensor is None or tensor.dtype == ir.DataType.FLOAT:
        return table
    wide = lazy(lambda: tensor.numpy().astype(np.float32), ir.DataType.FLOAT, shape_of(tensor))
    return add_initializer(graph, f"{tensor.name}_float", wide)
