"""Compute attention of prompts on an int8 cache in fp32, and of other runs by the int8 kernel.

    If(16 or more tokens per row, or several tokens in several rows)
        then  K, V = ScatterND(cache, QuantizeLinear(new / scale))
              Scan(each row)  GroupQueryAttention(q * k_scale, Cast(K[slot, :total]), Cast(V[slot, :total]))
              * v_scale
        else  GroupQueryAttention(q, new, cache as int8)

The kernel accepts several new tokens on a cache for one row only, so the Scan runs over rows, while products
run over all rows at once. The input ``cache_rows`` [batch] states which row of the bound caches each row
uses.

The int8 kernel dequantizes keys and values again for every query: 128 queries on 512 tokens take three times
as long as the fp32 kernel including the conversion. Both use the same rounded keys and values, also for the
new tokens. ScatterND does not copy if past and present are bound to the same memory.

A head sink of -1e30 does not change results, but makes onnxruntime 1.31 select its kernel for whole score
rows (``gqa_attention_base.h``). On int8, with one query per row, it takes two thirds of the tiled kernel's
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ....contract import CACHE_ROWS, INPUT_IDS, SEQLENS_K, TOTAL_SEQUENCE_LENGTH
from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    insert,
    int_attribute,
    nodes_of,
    replace,
    shared_constant,
    static_size,
    weight,
)
from ...graph.lazy import Array
from ...passes.base import GraphPass
from .attention import HEAD_SINK

_MIN_QUERIES = 16  # queries per row; for fewer the int8 kernel is as fast
_NO_SINK = np.float32(-1e30)
_NUM_INPUTS = 14  # of GroupQueryAttention with scales
_KERNEL = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size")


@dataclass(frozen=True, slots=True)
class _Run:
    """Values that all attentions of a run share.

    Args:
        is_prompt: [1] bool.
        places: [batch, sequence, heads, 3], the indices of the new tokens' heads in a cache.
        of_rows: four values per row: [batch, 2] begin and [batch, 2] end in a cache's first and third axis,
            [batch, 1] its ``seqlens_k``, and [batch] its ``total_sequence_length``.
    """

    is_prompt: ir.Value
    places: ir.Value
    of_rows: tuple[ir.Value, ...]


@dataclass(slots=True)
class _Branch:
    """A subgraph under construction, with names that are unique in the model."""

    stem: str
    nodes: list[ir.Node] = field(default_factory=list)

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node; return its first output."""
        result: ir.Value = self.add(op_type, inputs, attributes, domain, 1).outputs[0]
        return result

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any],
        domain: str,
        num_outputs: int,
    ) -> ir.Node:
        """Add a node with several outputs."""
        name = f"{self.stem}/{op_type}_{len(self.nodes)}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for number, output in enumerate(node.outputs):
            output.name = f"{name}/{number}"
        self.nodes.append(node)
        return node

    def graph(self, outputs: Sequence[ir.Value]) -> ir.Graph:
        """Return the subgraph."""
        return ir.Graph([], outputs, nodes=self.nodes, name=self.stem)


class PromptAttentionPass(GraphPass):
    """Add the fp32 branch for prompts to every GroupQueryAttention on an int8 cache."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: dict[int, _Run] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite all nodes with separate q, k and v."""
        self._runs = {}
        for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
            if "k_quant_type" not in node.attributes:
                continue
            reason = _misfit(node)
            if reason is not None:
                self.refuse(node, reason)
                continue
            self._lower(graph, node)
            self.fired += 1

    def _lower(self, graph: ir.Graph, node: ir.Node) -> None:
        heads = int_attribute(node, "kv_num_heads", 0)
        if heads not in self._runs:
            self._runs[heads] = _run(graph, heads)
        run = self._runs[heads]
        stem = str(node.outputs[1].name)
        branches = {
            "then_branch": _prompt(graph, node, run, f"{stem}/prompt"),
            "else_branch": _int8(graph, node, f"{stem}/int8"),
        }
        chosen = insert(node, "If", [run.is_prompt], branches, num_outputs=3)
        chosen.name = node.name
        for old, new in zip(node.outputs, chosen.outputs, strict=True):
            replace(old, new)
        graph.remove(node, safe=True)


def _misfit(node: ir.Node) -> str | None:
    if len(node.inputs) < _NUM_INPUTS or any(
        value is None for value in (*node.inputs[:5], *node.inputs[12:14])
    ):
        return "q, k and v are not three inputs"
    if int_attribute(node, "do_rotary", 0) and node.inputs[9] is None:
        return "it rotates by the cache's length instead of position_ids"
    return None if static_size(node.inputs[3], 3) else "the head size is unknown"


def _run(graph: ir.Graph, heads: int) -> _Run:
    """Write the values that all attentions with ``heads`` KV heads share, at the start of the graph."""
    first = graph[0]
    inputs = {str(value.name): value for value in graph.inputs}
    if CACHE_ROWS not in inputs:
        inputs[CACHE_ROWS] = ir.val(CACHE_ROWS, ir.DataType.INT64, ["batch"])
        graph.inputs.append(inputs[CACHE_ROWS])
    ids, slots, int32, int64 = inputs[INPUT_IDS], inputs[CACHE_ROWS], ir.DataType.INT32, ir.DataType.INT64

    def op(op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
        return insert(first, op_type, operands, attributes).outputs[0]

    def held(name: str, *content: int) -> ir.Value:
        return shared_constant(graph, f"prompt.{name}", np.array(content, np.int64))

    one, last = held("one", 1), held("last_axis", -1)
    batch, size = op("Shape", ids, start=0, end=1), op("Shape", ids, start=1, end=2)
    several = op("And", op("Greater", batch, one), op("Greater", size, one))
    is_prompt = op("Or", several, op("GreaterOrEqual", size, held("min_queries", _MIN_QUERIES)))
    ends = op("Add", op("Cast", inputs[SEQLENS_K], to=int(int64)), one)
    fresh = op("Equal", size, op("Cast", inputs[TOTAL_SEQUENCE_LENGTH], to=int(int64)))
    ends = op(
        "Where", fresh, op("Expand", size, batch), ends
    )  # the rows of right-padded prompts end at different tokens
    steps = [shared_constant(graph, f"prompt.scalar_{step}", np.array(step, np.int64)) for step in (0, 1)]
    offsets = op("Range", steps[0], op("Squeeze", size, held("axis", 0)), steps[1])
    positions = op("Add", op("Unsqueeze", op("Sub", ends, size), last), offsets)
    grid = shared_constant(graph, f"prompt.heads_{heads}", np.array([[0, head, 0] for head in range(heads)]))
    places = op("Mul", op("Unsqueeze", positions, held("axes", 2, 3)), held("last", 0, 0, 1))
    of_slots = op("Mul", op("Unsqueeze", slots, held("row_axes", 1, 2, 3)), held("first", 1, 0, 0))
    slots = op("Unsqueeze", slots, last)
    begins = op("Mul", slots, held("without_length", 1, 0))
    stops = op("Concat", op("Add", slots, one), op("Unsqueeze", ends, last), axis=-1)
    totals = op("Cast", ends, to=int(int32))
    lengths = op("Cast", op("Unsqueeze", op("Sub", ends, one), last), to=int(int32))
    places = op("Add", op("Add", places, of_slots), grid)
    return _Run(is_prompt, places, (begins, stops, lengths, totals))


def _int8(graph: ir.Graph, node: ir.Node, stem: str) -> ir.Graph:
    """Return a branch with the node itself, with a head sink that selects the kernel for whole score rows."""
    branch, inputs = _Branch(stem), list(node.inputs)
    heads = int_attribute(node, "num_heads", 0)
    if inputs[HEAD_SINK] is None:
        inputs[HEAD_SINK] = shared_constant(graph, f"prompt.no_sink_{heads}", np.full(heads, _NO_SINK))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return branch.graph(branch.add(node.op_type, inputs, attributes, node.domain, 3).outputs)


def _prompt(graph: ir.Graph, node: ir.Node, run: _Run, stem: str) -> ir.Graph:
    branch = _Branch(stem)
    query, key, value = (_rotated(branch, node, position) for position in range(3))
    caches = [_written(graph, branch, node, run, new, position) for new, position in ((key, 0), (value, 1))]
    k_scale, v_scale = (_by_query_head(graph, node, scale) for scale in node.inputs[12:14])
    axis = shared_constant(graph, "prompt.one", np.array([1], np.int64))
    rows = branch.op("Unsqueeze", branch.op("Mul", query, k_scale), axis)
    body = _row(graph, node, caches, f"{stem}/row")
    attended = branch.op("Scan", rows, *run.of_rows, body=body, num_scan_inputs=1 + len(run.of_rows))
    attended = branch.op("Squeeze", attended, axis)
    return branch.graph([branch.op("Mul", attended, v_scale), *caches])


def _row(graph: ir.Graph, node: ir.Node, caches: Sequence[ir.Value], stem: str) -> ir.Graph:
    """Return the Scan body: attention of one row [1, sequence, heads * head_dim] on unscaled cache values."""
    branch = _Branch(stem)
    kinds: dict[str, tuple[ir.DataType, Sequence[int | str]]]
    kinds = {"query": (ir.DataType.FLOAT, [1, "sequence", "width"])}
    kinds |= {"begin": (ir.DataType.INT64, [2]), "end": (ir.DataType.INT64, [2])}
    kinds |= {"length": (ir.DataType.INT32, [1]), "total": (ir.DataType.INT32, [])}
    inputs = [ir.val(f"{stem}/{name}", dtype, shape) for name, (dtype, shape) in kinds.items()]
    query, begin, end, length, total = inputs
    axes = shared_constant(graph, "prompt.row_and_length", np.array([0, 2], np.int64))
    held = [
        branch.op("Cast", branch.op("Slice", cache, begin, end, axes), to=int(ir.DataType.FLOAT))
        for cache in caches
    ]
    none = shared_constant(graph, "prompt.none", np.zeros((1, 0, _width(node)), np.float32))
    attributes = {name: node.attributes[name].value for name in _KERNEL if name in node.attributes}
    operands: list[ir.Value | None] = [query, none, none, *held, length, total]
    operands += [None] * (HEAD_SINK - len(operands)) + [node.inputs[HEAD_SINK]]
    attended = branch.op(node.op_type, *operands, domain=node.domain, **attributes)
    return ir.Graph(inputs, [attended], nodes=branch.nodes, name=stem)


def _rotated(branch: _Branch, node: ir.Node, position: int) -> ir.Value:
    """Return q, k or v; q and k are rotated if the kernel does that."""
    x = node.inputs[position]
    assert x is not None  # noqa: S101 -- _misfit refused it
    if position > 1 or not int_attribute(node, "do_rotary", 0):
        return x
    attributes: dict[str, Any] = {
        "num_heads": int_attribute(node, "num_heads" if position == 0 else "kv_num_heads", 0),
        "interleaved": int_attribute(node, "rotary_interleaved", 0),
    }
    rotary = 2 * (static_size(node.inputs[7], 1) or 0)
    if rotary != static_size(node.inputs[3], 3):
        attributes["rotary_embedding_dim"] = rotary
    return branch.op("RotaryEmbedding", x, *node.inputs[7:10], **attributes)


def _written(
    graph: ir.Graph, branch: _Branch, node: ir.Node, run: _Run, new: ir.Value, position: int
) -> ir.Value:
    """Return the cache with the new tokens, rounded as the int8 kernel does."""
    past, scale = node.inputs[3 + position], node.inputs[12 + position]
    assert past is not None  # noqa: S101 -- _misfit refused it
    assert scale is not None  # noqa: S101 -- likewise
    inverse = add_initializer(graph, f"{scale.name}.inverse", np.float32(1) / _content(scale))
    one = shared_constant(graph, "prompt.unit_scale", np.array(1, np.float32))
    zero = shared_constant(graph, "prompt.middle", np.array(0, np.int8))
    rounded = branch.op("QuantizeLinear", branch.op("Mul", new, inverse), one, zero)
    heads, size = static_size(past, 1) or 0, static_size(past, 3) or 0
    shape = shared_constant(graph, f"prompt.apart_{heads}_{size}", np.array([0, 0, heads, size], np.int64))
    return branch.op("ScatterND", past, run.places, branch.op("Reshape", rounded, shape))


def _by_query_head(graph: ir.Graph, node: ir.Node, scale: ir.Value | None) -> ir.Value:
    """Return the scales of keys or values per channel of every query head, or the single scale."""
    assert scale is not None  # noqa: S101 -- _misfit refused it
    content, (heads, groups) = _content(scale), (int_attribute(node, name, 1) for name in _KERNEL[:2])
    if len(content) > 1:
        content = np.repeat(content.reshape(groups, -1), heads // groups, axis=0).reshape(-1)
    return add_initializer(graph, f"{scale.name}.by_query_head", content)


def _content(scale: ir.Value) -> Array:
    """Return the scales, per channel or a single one, as a vector."""
    tensor = weight(scale)
    if tensor is None:
        raise AssertionError("unreachable: Int8CachePass stores the scales")
    return tensor.numpy().reshape(-1)


def _width(node: ir.Node) -> int:
    return int_attribute(node, "kv_num_heads", 0) * (static_size(node.inputs[3], 3) or 0)
