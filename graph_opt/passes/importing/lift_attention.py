"""Replace com.microsoft GroupQueryAttention by RotaryEmbedding on q and k, and Attention with a causal mask.

The kernel derives positions and mask from the cache lengths; the canonical graph reads positions and padding
from its inputs. Both agree on every token that is not padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ....contract import ATTENTION_MASK, CACHE, INPUT_IDS, POSITION_IDS
from ....records import dataclass
from ...analysis.decoder_inputs import CausalMasks, is_decoder
from ...analysis.head_layout import split_heads
from ...analysis.probe import Probe, has_caches, sample_lengths
from ...analysis.rope_rows import RopeRows
from ...graph.edit import (
    MICROSOFT,
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    static_size,
)
from ..base import GraphPass

_INPUTS = 14
_LATER_INPUTS = ("head sink", "quantization scale", "quantization scale", "q or k norm")


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Number of query heads, number of key heads, head_dim."""

    query: int
    key: int
    size: int


class LiftAttentionPass(GraphPass):
    """Replace GroupQueryAttention in graphs that compute cache lengths from masks or shapes."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every GroupQueryAttention."""
        nodes = list(nodes_of(graph, "GroupQueryAttention", MICROSOFT))
        if not nodes or not is_decoder(graph):
            return
        masks, rows = CausalMasks(graph), RopeRows(graph)
        for node in nodes:
            inputs = [*node.inputs, *[None] * (_INPUTS - len(node.inputs))]
            heads = grouped_heads(node)
            reason = _misfit(graph, node, inputs)
            if reason is not None or isinstance(heads, str):
                self.refuse(node, reason or str(heads))
                continue
            self._lift(graph, node, inputs, heads, masks, rows)
            self.fired += 1

    @staticmethod
    def _lift(
        graph: ir.Graph,
        node: ir.Node,
        inputs: list[ir.Value | None],
        heads: GroupedHeads,
        masks: CausalMasks,
        rows: RopeRows,
    ) -> None:
        query, key, value = _parts(graph, node, heads)
        if int_attribute(node, "do_rotary", 0):
            tables = [rows.at(node, table, inputs[9]) for table in inputs[7:9] if table is not None]
            interleaved = int_attribute(node, "rotary_interleaved", 0)
            query = _rotated(node, query, tables, heads.query, heads.size, interleaved)
            key = _rotated(node, key, tables, heads.key, heads.size, interleaved)
        window = int_attribute(node, "local_window_size", -1)
        mask = masks.additive(None if window < 0 else window)
        if inputs[10] is not None:
            mask = masks.where_seen(inputs[10], mask, node)
        scale = float_attribute(node, "scale", 0.0) or heads.size**-0.5
        attributes: dict[str, Any] = {"q_num_heads": heads.query, "kv_num_heads": heads.key, "scale": scale}
        softcap = float_attribute(node, "softcap", 0.0)
        if softcap:
            attributes["softcap"] = softcap
        # The operator of onnxruntime may keep its caches in one buffer as long as the context; the standard
        # one appends. So the sizes of a cache change: what it gets is called past, and what it returns
        # total.
        for past in inputs[3:5]:
            if past is not None:
                past.shape = ir.Shape(["batch", heads.key, "past", heads.size])
        cached = inputs[3] is not None
        operands = [query, key, value, mask, *(inputs[3:5] if cached else [])]
        made = insert(node, "Attention", operands, attributes, num_outputs=3 if cached else 1)
        made.name = node.name
        presents = made.outputs[1:] or [split_heads(node, x, heads.key, heads.size) for x in (key, value)]
        for old, new in zip(node.outputs, [made.outputs[0], *presents], strict=False):
            replace(old, new)
        for present in presents:
            present.shape = ir.Shape(["batch", heads.key, "total" if cached else "sequence", heads.size])
        remove_unused(graph, node)


def _misfit(graph: ir.Graph, node: ir.Node, inputs: list[ir.Value | None]) -> str | None:
    given = [name for name, value in zip(_LATER_INPUTS, inputs[11:15], strict=False) if value is not None]
    if given:
        return f"it has a {given[0]}"
    if int_attribute(node, "smooth_softmax", 0) > 0 or int_attribute(node, "qk_output", 0):
        return "it uses smooth_softmax or returns its scores"
    for past in inputs[3:5] if has_caches(graph) else ():
        if past is None or not past.is_graph_input() or not CACHE.fullmatch(str(past.name)):
            return "its cache is not a graph input past_key_values.N"
    if int_attribute(node, "do_rotary", 0) and (inputs[7] is None or inputs[8] is None):
        return "it has do_rotary but no cos and sin tables"
    return _lengths_misfit(graph, inputs[5])


def _lengths_misfit(graph: ir.Graph, lengths: ir.Value | None) -> str | None:
    """Return why the evaluated cache lengths differ from those of attention_mask, None if they are equal."""
    if lengths is None or lengths.is_graph_input():
        return "its cache lengths are a graph input"
    probe, (past, new) = Probe(graph, lengths), sample_lengths(graph)
    mask = np.ones((2, past + new), np.int64)
    cases = [mask] if ATTENTION_MASK not in probe.input_names else [mask, mask.copy()]
    cases[-1][1, past + new // 2 :] = 1 if len(cases) == 1 else 0
    for case in cases:
        feed: dict[str, Any] = {
            ATTENTION_MASK: case,
            INPUT_IDS: mask[:, :new],
            POSITION_IDS: mask[:, :new],
        }
        for value in probe.inputs:
            sizes = (2, static_size(value, 1) or 1, past, static_size(value, 3) or 1)
            feed.setdefault(str(value.name), np.zeros(sizes, np.float32))
        if not np.array_equal(probe(feed).reshape(-1), case.sum(1) - 1):
            return "its cache lengths differ from those of attention_mask"
    return None


def grouped_heads(node: ir.Node) -> GroupedHeads | str:
    """Return the heads of a GroupQueryAttention, or why they are unknown."""
    query, key = int_attribute(node, "num_heads", 0), int_attribute(node, "kv_num_heads", 0)
    cache = node.inputs[3] if len(node.inputs) > 3 else None
    size = static_size(cache, 3) or (static_size(node.outputs[1], 3) if len(node.outputs) > 1 else None)
    width = static_size(node.inputs[0], -1)
    if size is None and width is None:
        return "its head size is unknown"
    packed = len(node.inputs) < 2 or node.inputs[1] is None
    return GroupedHeads(query, key, size or (width or 0) // (query + 2 * key if packed else query))


def attended_sizes(graph: ir.Graph) -> dict[str, tuple[int, int]]:
    """Return the number of heads and head_dim of every cache that a GroupQueryAttention reads, by name."""
    sizes: dict[str, tuple[int, int]] = {}
    for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
        heads = grouped_heads(node)
        caches = [cache for cache in node.inputs[3:5] if cache is not None]
        if isinstance(heads, GroupedHeads):
            sizes |= {str(cache.name): (heads.key, heads.size) for cache in caches}
    return sizes


def _parts(graph: ir.Graph, node: ir.Node, heads: GroupedHeads) -> list[ir.Value]:
    """Return q, k and v as separate values."""
    operands = [value for value in node.inputs[:3] if value is not None]
    if len(operands) == 3:
        return operands
    sizes = np.array([heads.query, heads.key, heads.key]) * heads.size
    split = add_initializer(graph, f"{node.name}.sizes", sizes.astype(np.int64))
    parts = insert(node, "Split", [operands[0], split], {"axis": -1}, num_outputs=3).outputs
    for part, size in zip(parts, sizes.tolist(), strict=True):
        part.shape, part.type = ir.Shape(["batch", "sequence", size]), operands[0].type
    return list(parts)


def _rotated(
    node: ir.Node, x: ir.Value, tables: list[ir.Value], heads: int, size: int, interleaved: int
) -> ir.Value:
    attributes = {"num_heads": heads, "interleaved": interleaved}
    half = static_size(tables[0], -1)
    if half is not None and 2 * half < size:
        attributes["rotary_embedding_dim"] = 2 * half
    rotated = insert(node, "RotaryEmbedding", [x, *tables], attributes).outputs[0]
    rotated.shape, rotated.type = x.shape, x.type
    return rotated
