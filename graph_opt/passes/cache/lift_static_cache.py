"""Replace TensorScatter into a preallocated cache and Attention on it by Attention with past and present.

ONNX's Attention of opset 24 describes two uses of a cache; this is the second. The caller passes the
position of the new tokens (``write_indices``) and the number of valid tokens (``nonpad_kv_seqlen``). In the
portable graph the length of the past gives both, so these inputs are removed.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, past_name, present_of
from ....records import dataclass
from ...analysis.decoder_inputs import is_decoder
from ...graph.edit import insert, int_attribute, nodes_of, remove_unused, replace, static_size
from ..base import GraphPass

_LENGTHS = 6  # index of Attention's input nonpad_kv_seqlen


@dataclass(frozen=True, slots=True)
class _Write:
    """A TensorScatter: the cache, the new tokens, and their position."""

    node: ir.Node
    cache: ir.Value
    new: ir.Value
    index: ir.Value


class LiftStaticCachePass(GraphPass):
    """Replace preallocated caches by past and present."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace the caches of all attentions or of none, because they share the length inputs."""
        if not is_decoder(graph) or not any(nodes_of(graph, "TensorScatter")):
            return
        written = [(node, _writes(node)) for node in nodes_of(graph, "Attention")]
        for node, writes in written:
            if isinstance(writes, str):
                self.refuse(node, writes)
        if any(isinstance(writes, str) for _, writes in written):
            return
        for layer, (node, writes) in enumerate(written):
            if not isinstance(writes, str):
                _lift(graph, node, layer, writes)
                self.fired += 1
        for value in [value for value in graph.inputs if not value.uses()]:
            if value.name not in (INPUT_IDS, ATTENTION_MASK, POSITION_IDS):
                graph.inputs.remove(value)


def _writes(node: ir.Node) -> tuple[_Write, _Write] | str:
    """Return the writes of an attention's keys and values, or why they are not known."""
    lengths = node.inputs[_LENGTHS] if len(node.inputs) > _LENGTHS else None
    if lengths is None or len(node.outputs) > 1:
        return "its caches are preallocated, but it has no nonpad_kv_seqlen, or several outputs"
    if node.inputs[3] is not None or not int_attribute(node, "is_causal", 0):
        return "its caches are preallocated, and its mask is not is_causal alone"
    key, value = _write(node.inputs[1]), _write(node.inputs[2])
    if key is None or value is None or key.index is not value.index:
        return "its keys and values are not graph inputs updated by TensorScatter at one position"
    if not key.index.is_graph_input() or not lengths.is_graph_input():
        return "its write_indices or nonpad_kv_seqlen is computed, not a graph input"
    heads = int_attribute(node, "kv_num_heads", 0)
    if not heads or any(static_size(write.cache, -1) is None for write in (key, value)):
        return "its q, k and v are not [batch, sequence, heads * head_dim] with a known size"
    return key, value


def _write(value: ir.Value | None) -> _Write | None:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "TensorScatter" or node.domain or len(node.inputs) < 3:
        return None
    cache, new, index = node.inputs[:3]
    if cache is None or new is None or index is None or not cache.is_graph_input():
        return None
    circular = "mode" in node.attributes and node.attributes["mode"].as_string() != "linear"
    along = int_attribute(node, "axis", -2) in (1, -2)
    flat = cache.shape is not None and len(cache.shape) == 3
    return _Write(node, cache, new, index) if along and flat and not circular else None


def _lift(graph: ir.Graph, node: ir.Node, layer: int, writes: tuple[_Write, _Write]) -> None:
    attributes: dict[str, Any] = {name: x.value for name, x in node.attributes.items()}
    pasts = [
        _past(layer, kind, write, attributes["kv_num_heads"])
        for kind, write in zip(("key", "value"), writes, strict=True)
    ]
    operands = [node.inputs[0], writes[0].new, writes[1].new, None, *pasts]
    attention = insert(node, "Attention", operands, attributes, num_outputs=3)
    attention.name = node.name
    replace(node.outputs[0], attention.outputs[0])
    graph.remove(node, safe=True)
    for past, present, write in zip(pasts, attention.outputs[1:], writes, strict=True):
        graph.inputs[list(graph.inputs).index(write.cache)] = past
        present.name = present_of(str(past.name))
        axes = list(past.shape or ())
        present.type, present.shape = past.type, ir.Shape([*axes[:2], "total", axes[3]])
        old = write.node.outputs[0]
        if old.is_graph_output():
            graph.outputs[list(graph.outputs).index(old)] = present
        remove_unused(graph, write.node)


def _past(layer: int, kind: str, write: _Write, heads: int) -> ir.Value:
    name = past_name(layer, kind)
    size = (static_size(write.cache, -1) or 0) // heads
    return ir.val(name, write.cache.dtype or ir.DataType.FLOAT, ["batch", heads, "past", size])
