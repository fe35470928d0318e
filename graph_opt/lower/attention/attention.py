"""Lower Attention(RotaryEmbedding(q), RotaryEmbedding(k), v, mask, past) to GroupQueryAttention on shared KV.

The meaning of the mask and the content of the rope tables are found by evaluation (``probe.py``). The limits
of the kernel are those of onnxruntime's ``group_query_attention_helper.h``.
"""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from ....contract import CONTEXT_LENGTH, POSITION_IDS, SEQLENS_K, SLIDING_WINDOWS, TOTAL_SEQUENCE_LENGTH
from ...analysis import probe
from ...analysis.cache_owner import owner_of
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
from ...passes.base import GraphPass
from ...passes.fuse.sink_attention import has_sinks, sinks_of
from ..kernels import Kernels

HEAD_SINK = 11  # index of GroupQueryAttention's input


class GroupQueryAttentionPass(GraphPass):
    """Lower every ``Attention`` with a KV cache to com.microsoft ``GroupQueryAttention``.

    Args:
        context_length: maximum tokens of a sequence; the length of the rope tables.
        kernels: the capabilities of the target's kernels.
    """

    def __init__(self, context_length: int, kernels: Kernels) -> None:
        super().__init__()
        self.context_length = context_length
        self.kernels = kernels
        self._meanings: dict[ir.Value | None, probe.MaskMeaning | str] = {}
        self._tables: dict[ir.Value, ir.Value] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``; store the context length and the sliding windows in its metadata."""
        result = super().call(model)
        model.metadata_props[CONTEXT_LENGTH] = str(self.context_length)
        model.metadata_props[SLIDING_WINDOWS] = json.dumps(_windows(model.graph))
        return result

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention that the kernel can compute."""
        self._meanings, self._tables = {}, {}
        readers = {node for node in nodes_of(graph, "Attention") if owner_of(node) is not None}
        for node in nodes_of(graph, "Attention"):
            if node in readers:
                self.refuse(node, "it reads the cache of another layer")
                continue
            meaning = _misfit(node) or self._kernel_misfit(node) or self._meaning(graph, node)
            if isinstance(meaning, str):
                self.refuse(node, meaning)
                continue
            self._lower(graph, node, meaning)
            self.fired += 1
        for node in nodes_of(graph, "RotaryEmbedding"):
            self._read_table(graph, node)

    def _meaning(self, graph: ir.Graph, node: ir.Node) -> probe.MaskMeaning | str:
        mask = node.inputs[3]
        if mask is None:
            causal = int_attribute(node, "is_causal", 0)
            return probe.MaskMeaning() if causal else "it has no mask, so it is not causal"
        if mask not in self._meanings:
            self._meanings[mask] = probe.mask_meaning(graph, mask, self.context_length)
        meaning = self._meanings[mask]
        if isinstance(meaning, str) or meaning.window is None or self.kernels.sliding_window:
            return meaning
        return f"the kernel has no sliding window; choose a context length of at most {meaning.window}"

    def _kernel_misfit(self, node: ir.Node) -> str | None:
        if has_sinks(node) and not self.kernels.head_sink:
            return "the kernel has no sinks"
        capped = float_attribute(node, "softcap", 0.0) != 0
        return "the kernel does not support softcap" if capped and not self.kernels.softcap else None

    def _lower(self, graph: ir.Graph, node: ir.Node, meaning: probe.MaskMeaning) -> None:
        query, key, value, _, past_key, past_value = node.inputs[:6]
        attributes = _attributes(node, meaning)
        tables: list[ir.Value] = []
        rope = self._shared_rope(node)
        if rope is not None:
            query_rope, key_rope = rope
            query, key = query_rope.inputs[0], key_rope.inputs[0]
            tables = [self._table(graph, angle) for angle in query_rope.inputs[1:3] if angle is not None]
            if self.kernels.position_inputs:
                tables.append(_positions(graph))
            attributes |= {"do_rotary": 1, "rotary_interleaved": int_attribute(query_rope, "interleaved", 0)}
        lengths = [_int32_input(graph, SEQLENS_K, ["batch"]), _int32_input(graph, TOTAL_SEQUENCE_LENGTH, [])]
        inputs = [query, key, value, past_key, past_value, *lengths, *tables]
        sinks = sinks_of(graph, node, past_key.dtype if past_key is not None else None)
        if sinks is not None:
            inputs += [None] * (HEAD_SINK - len(inputs)) + [sinks]
        lowered = insert(node, "GroupQueryAttention", inputs, attributes, domain=MICROSOFT, num_outputs=3)
        lowered.name = node.name
        for old, new in zip(node.outputs, lowered.outputs, strict=True):
            replace(old, new)
        remove_unused(graph, node)

    def _shared_rope(self, node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
        """Return the RotaryEmbedding nodes of q and k if the kernel can rotate instead, else None."""
        pair = [value.producer() if value is not None else None for value in node.inputs[:2]]
        ropes = [rope for rope in pair if rope is not None and rope.op_type == "RotaryEmbedding"]
        if not self.kernels.rotary_in_attention or len(ropes) != 2:
            return None
        reason = rope_misfit(node, ropes[0], ropes[1])
        if probe.turns_with_axes(ropes[0].inputs[1]):
            reason = "positions have several axes, and the kernel's table has one"
        if reason:
            self.refuse(ropes[0], reason)
            return None
        return ropes[0], ropes[1]

    def _read_table(self, graph: ir.Graph, node: ir.Node) -> None:
        """Make a remaining RotaryEmbedding read tables, so that rows do not depend on each other's length."""
        if (len(node.inputs) > 3 and node.inputs[3] is not None) or probe.turns_with_axes(node.inputs[1]):
            return
        tables = [self._table(graph, angle) for angle in node.inputs[1:3] if angle is not None]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        rotated = insert(node, "RotaryEmbedding", [node.inputs[0], *tables, _positions(graph)], attributes)
        rotated.name = node.name
        replace(node.outputs[0], rotated.outputs[0])
        remove_unused(graph, node)

    def _table(self, graph: ir.Graph, angle: ir.Value) -> ir.Value:
        if angle not in self._tables:
            table = ir.tensor(
                probe.rope_table(graph, angle, self.context_length).astype(
                    (angle.dtype or ir.DataType.FLOAT).numpy()
                )
            )
            self._tables[angle] = add_initializer(graph, f"{angle.name}_table", table)
        return self._tables[angle]


def _positions(graph: ir.Graph) -> ir.Value:
    return next(value for value in graph.inputs if value.name == POSITION_IDS)


def _attributes(node: ir.Node, meaning: probe.MaskMeaning) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "num_heads": int_attribute(node, "q_num_heads", 0),
        "kv_num_heads": int_attribute(node, "kv_num_heads", 0),
    }
    for name in ("scale", "softcap"):
        if name in node.attributes:
            attributes[name] = float_attribute(node, name, 0.0)
    if meaning.window is not None:
        attributes["local_window_size"] = meaning.window
    return attributes


def _misfit(node: ir.Node) -> str | None:
    """Return why an Attention cannot be lowered to GroupQueryAttention, None if it can."""
    inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
    if inputs[4] is None or inputs[5] is None or len(node.outputs) < 3:
        return "it has no KV cache"
    if inputs[6] is not None or len(node.outputs) > 3:
        return "it uses nonpad_kv_seqlen or qk_matmul_output"
    if not int_attribute(node, "q_num_heads", 0) or not int_attribute(node, "kv_num_heads", 0):
        return "its q, k and v are not [batch, sequence, heads * head_dim]"
    size, value_size = (static_size(value, 3) for value in inputs[4:6])
    if size is None or size != value_size:
        return f"the head sizes of key and value must be equal and known, found {size} and {value_size}"
    return f"the kernel needs a head size divisible by 8, found {size}" if size % 8 else None


def rope_misfit(node: ir.Node, query: ir.Node, key: ir.Node) -> str | None:
    """Return why the kernel cannot rotate q and k as these two nodes do, None if it can."""
    if list(query.inputs[1:]) != list(key.inputs[1:]):
        return "q and k are rotated by different angles"
    if len(query.inputs) > 3 and query.inputs[3] is not None:
        return "the rope reads a table by position_ids; expected angles [batch, sequence, rotary_dim / 2]"
    names = ("interleaved", "rotary_embedding_dim")
    if any(int_attribute(query, name, 0) != int_attribute(key, name, 0) for name in names):
        return "q and k have different rotary attributes"
    rotary = int_attribute(query, "rotary_embedding_dim", 0) or static_size(node.inputs[4], 3) or 0
    return f"the kernel needs a rotary dimension divisible by 16, found {rotary}" if rotary % 16 else None


def _int32_input(graph: ir.Graph, name: str, shape: list[str]) -> ir.Value:
    for value in graph.inputs:
        if value.name == name:
            return value
    value = ir.val(name, ir.DataType.INT32, shape)
    graph.inputs.append(value)
    return value


def _windows(graph: ir.Graph) -> dict[str, int]:
    """Return the sliding window of each KV input that has one, by name."""
    windows = {}
    for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
        window = int_attribute(node, "local_window_size", -1)
        for value in node.inputs[3:5]:
            if window > 0 and value is not None and value.name:
                windows[value.name] = window
    return windows
