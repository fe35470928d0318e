"""com.microsoft ``PagedAttention`` in standard operators, as its documentation defines it.

It runs on the CPU and shares no code with the lowering to the operator. Every token attends to all positions
of its row's block table, so this is for small cases only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from carryall.graph_opt.graph.edit import MICROSOFT, add_initializer, insert, nodes_of, remove_unused, replace
from carryall.graph_opt.passes.base import GraphPass


class PagedStandInPass(GraphPass):
    """Decompose every ``PagedAttention``."""

    def rewrite(self, graph: ir.Graph) -> None:
        for node in nodes_of(graph, "PagedAttention", MICROSOFT):
            written = _Written(graph, node)
            for old, new in zip(node.outputs, written.outputs(), strict=True):
                replace(old, new)
            remove_unused(graph, node)
            self.fired += 1


class _Written:
    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node, self.count = graph, node, 0
        self.facts = {name: attribute.value for name, attribute in node.attributes.items()}
        cache = node.inputs[3]
        assert cache is not None
        assert cache.shape is not None
        assert cache.dtype is not None
        self.groups, self.size = self.facts["kv_num_heads"], int(cache.shape[3])  # type: ignore[arg-type]
        self.cache_dtype = cache.dtype
        packed = node.inputs[0]
        assert packed is not None
        self.dtype = (packed.dtype or ir.DataType.FLOAT).numpy() if self.scales() else cache.dtype.numpy()

    def scales(self) -> list[ir.Value]:
        """Return the scales of keys and values; none for a cache that is not quantized."""
        return [value for value in self.node.inputs[14:16] if value is not None]

    def quantized(self, value: ir.Value, index: int) -> ir.Value:
        """Return heads [tokens, kv_heads, size] as the cache holds them."""
        if not self.scales():
            return value
        wide = self.op("Cast", value, to=int(ir.DataType.FLOAT))
        scaled = self.op("Div", wide, self.scale(index, 1))
        if self.cache_dtype == ir.DataType.INT8:
            bounds = self.constant(-128, np.float32), self.constant(127, np.float32)
            scaled = self.op("Clip", self.op("Round", scaled), *bounds)
        return self.op("Cast", scaled, to=int(self.cache_dtype))

    def read(self, seen: ir.Value, index: int) -> ir.Value:
        """Return [tokens, positions, kv_heads, size] of a cache as floats."""
        if not self.scales():
            return seen
        wide = self.op("Mul", self.op("Cast", seen, to=int(ir.DataType.FLOAT)), self.scale(index, 2))
        return self.op("Cast", wide, to=int(ir.DataType.from_numpy(self.dtype)))

    def scale(self, index: int, axes: int) -> ir.Value:
        shape = [1] * axes + ([self.groups, self.size] if self.per_channel(index) else [1, 1])
        return self.op("Reshape", self.scales()[index], self.constant(shape))

    def per_channel(self, index: int) -> bool:
        return bool(self.facts[("k_quant_type", "v_quant_type")[index]] == "PER_CHANNEL")

    def op(self, op_type: str, *operands: ir.Value | None, **attributes: object) -> ir.Value:
        return insert(self.node, op_type, operands, attributes).outputs[0]

    def constant(self, content: Any, dtype: Any = np.int64) -> ir.Value:
        self.count += 1
        return add_initializer(self.graph, f"{self.node.name}.{self.count}", np.array(content, dtype))

    def whole(self, value: ir.Value | None) -> ir.Value:
        return self.op("Cast", value, to=int(ir.DataType.INT64))

    def sizes(self, value: ir.Value | None, start: int, end: int) -> ir.Value:
        return self.op("Shape", value, start=start, end=end)

    def outputs(self) -> list[ir.Value]:
        """Return the outputs of the node: attended tokens [tokens, hidden], and both caches."""
        query, key, value, key_cache, value_cache, begins, past, table = self.node.inputs[:8]
        if key is None:
            query, key, value = self.unpacked(query)
        norms = self.node.inputs[12:14]
        if any(norm is not None for norm in norms):
            query, key = (self.normed(*pair) for pair in zip((query, key), norms, strict=True))
        ends = self.op("Slice", self.whole(begins), self.constant([1]), self.constant([2**40]))
        starts = self.op("Slice", self.whole(begins), self.constant([0]), self.constant([-1]))
        token = self.op(
            "Range", self.constant(0), self.op("Squeeze", self.sizes(query, 0, 1)), self.constant(1)
        )
        after = self.op("GreaterOrEqual", self.op("Unsqueeze", token, self.constant([1])), ends)
        row = self.op("ReduceSum", self.whole(after), self.constant([1]), keepdims=0)
        offset = self.op("Sub", token, self.op("Gather", starts, row))
        position = self.op("Add", offset, self.op("Gather", self.whole(past), row))
        tables = self.op("Gather", self.whole(table), row)  # [tokens, blocks]
        if self.facts.get("do_rotary"):
            query = self.rotated(query, position, self.facts["num_heads"])
            key = self.rotated(key, position, self.groups)
        caches = [
            self.stored(cache, part, index, tables, position)
            for index, (cache, part) in enumerate(((key_cache, key), (value_cache, value)))
        ]
        found = [self.op("Reshape", self.op("Gather", cache, tables), self.seen_shape()) for cache in caches]
        seen = [self.read(value, index) for index, value in enumerate(found)]
        return [self.attended(query, seen[0], seen[1], position), *map(self.held, caches)]

    def unpacked(self, packed: ir.Value | None) -> list[ir.Value]:
        widths = [self.size * count for count in (self.facts["num_heads"], self.groups, self.groups)]
        node = insert(self.node, "Split", [packed, self.constant(widths)], {"axis": 1}, num_outputs=3)
        return list(node.outputs)

    def normed(self, value: ir.Value | None, scale: ir.Value | None) -> ir.Value:
        """Return every head divided by its root mean square in float32, times the scale."""
        heads = self.op("Reshape", value, self.constant([0, -1, self.size]))
        wide = self.op("Cast", heads, to=int(ir.DataType.FLOAT))
        mean = self.op("ReduceMean", self.op("Mul", wide, wide), self.constant([-1]), keepdims=1)
        epsilon = self.constant(self.facts.get("qk_norm_epsilon", 1e-6), np.float32)
        root = self.op("Sqrt", self.op("Add", mean, epsilon))
        scaled = self.op("Mul", self.op("Div", wide, root), self.op("Cast", scale, to=int(ir.DataType.FLOAT)))
        narrow = self.op("Cast", scaled, to=int(ir.DataType.from_numpy(self.dtype)))
        return self.op("Reshape", narrow, self.constant([0, -1]))

    def rotated(self, value: ir.Value | None, position: ir.Value, heads: int) -> ir.Value:
        axis = self.constant([1])  # each token is a sequence, which may not be longer than the tables
        operands = [
            self.op("Unsqueeze", value, axis),
            *self.node.inputs[8:10],
            self.op("Unsqueeze", position, axis),
        ]
        interleaved = self.facts["rotary_interleaved"]
        width = self.node.inputs[8].shape[-1] * 2  # type: ignore[union-attr,index]
        rotary = width if width != self.size else 0
        rope = self.op(
            "RotaryEmbedding",
            *operands,
            num_heads=heads,
            interleaved=interleaved,
            rotary_embedding_dim=rotary,
        )
        return self.op("Squeeze", rope, axis)

    def stored(
        self,
        cache: ir.Value | None,
        part: ir.Value | None,
        index: int,
        tables: ir.Value,
        position: ir.Value,
    ) -> ir.Value:
        """Return the cache with the new tokens in their blocks."""
        length = self.sizes(cache, 1, 2)
        place = self.op("Unsqueeze", self.op("Div", position, length), self.constant([1]))
        block = self.op("GatherElements", tables, place, axis=1)
        within = self.op("Unsqueeze", self.op("Mod", position, length), self.constant([1]))
        heads = self.op("Reshape", part, self.constant([-1, self.groups, self.size]))
        places = self.op("Concat", block, within, axis=1)
        return self.op("ScatterND", self.movable(cache), places, self.movable(self.quantized(heads, index)))

    def movable(self, cache: ir.Value | None) -> ir.Value | None:
        """Return a cache as a type that operators move: float8e4m3fn as float, which loses nothing."""
        if self.cache_dtype != ir.DataType.FLOAT8E4M3FN:
            return cache
        return self.op("Cast", cache, to=int(ir.DataType.FLOAT))

    def held(self, cache: ir.Value) -> ir.Value:
        """Return the result of ``movable`` as the cache's type."""
        if self.cache_dtype != ir.DataType.FLOAT8E4M3FN:
            return cache
        return self.op("Cast", cache, to=int(self.cache_dtype))

    def seen_shape(self) -> ir.Value:
        return self.constant([0, -1, self.groups, self.size])

    def attended(
        self, query: ir.Value | None, keys: ir.Value, values: ir.Value, position: ir.Value
    ) -> ir.Value:
        """Return the attention of query [tokens, heads * size] on [tokens, positions, kv_heads, size]."""
        heads = self.facts["num_heads"] // self.groups
        split = self.op("Reshape", query, self.constant([0, self.groups, heads, self.size]))
        scores = self.op("Einsum", split, keys, equation="tghd,tpgd->tghp")
        scores = self.op("Mul", scores, self.constant(self.facts["scale"], self.dtype))
        if cap := self.facts.get("softcap"):
            bound = self.constant(cap, self.dtype)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, bound)), bound)
        back = self.op("Sub", self.op("Unsqueeze", position, self.constant([1])), self.positions(keys))
        window = self.facts["local_window_size"]
        near = self.op("Less", back, self.constant(window if window > 0 else 2**40))
        visible = self.op("And", near, self.op("GreaterOrEqual", back, self.constant(0)))
        mask = self.op("Unsqueeze", visible, self.constant([1, 2]))
        lowest = self.constant(np.finfo(self.dtype).min, self.dtype)
        weights = self.op("Softmax", self.op("Where", mask, scores, lowest), axis=-1)
        result = self.op("Einsum", weights, values, equation="tghp,tpgd->tghd")
        return self.op("Reshape", result, self.constant([0, -1]))

    def positions(self, keys: ir.Value) -> ir.Value:
        count = self.op("Squeeze", self.sizes(keys, 1, 2))
        return self.op("Range", self.constant(0), count, self.constant(1))
