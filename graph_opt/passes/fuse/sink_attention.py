"""Rewrite attention with sinks as ``Attention``, and back.

``Attention`` has no input for sinks, so the node holds them in ``meta``: until attention is lowered for a
target whose kernels have sinks, or until a graph without a KV cache has received one. No pass in between may
remove unused initializers. A target without sinks keeps the nodes of the portable graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...analysis.decoder_inputs import LOWEST, first_cache, is_decoder
from ...analysis.head_layout import head_sizes, join_heads, split_heads
from ...analysis.sink_attention import SinkAttention, appended, joined_source, sink_attentions
from ...graph.edit import (
    add_initializer,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    replace_but_shapes,
    shared_constant,
    weight,
)
from ...graph.lazy import lazy
from ..base import GraphPass

_KEY = "carryall.sinks"  # in the meta of a node: the initializer of its sinks
_MASK, _PAST = 3, 4  # operands of Attention


class SinkAttentionPass(GraphPass):
    """Replace attention with sinks by ``Attention``; ``sinks_of`` returns its sinks.

    Args:
        cached: replace attention on a KV cache; otherwise that of decoders without a cache.
    """

    def __init__(self, *, cached: bool = True) -> None:
        super().__init__()
        self._cached = cached

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every attention whose sinks are an initializer."""
        if not self._cached and (not is_decoder(graph) or first_cache(graph) is not None):
            return
        for attention in list(sink_attentions(graph, cached=self._cached)):
            if isinstance(attention, SinkAttention):
                _fuse(graph, attention)
                self.fired += 1
            else:
                self.refuse(*attention)


class SeparateSinksPass(GraphPass):
    """Write each ``Attention`` that holds sinks as several nodes, the form of the portable graph."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every one."""
        for node in [node for node in nodes_of(graph, "Attention") if has_sinks(node)]:
            _separate(graph, node)
            self.fired += 1


def has_sinks(node: ir.Node) -> bool:
    """Return whether an ``Attention`` has sinks."""
    return _KEY in node.meta


def sinks_of(graph: ir.Graph, node: ir.Node, dtype: ir.DataType | None) -> ir.Value | None:
    """Return an initializer [heads] of type ``dtype`` with the sinks of an ``Attention``, or None."""
    if not has_sinks(node):
        return None
    stored: ir.Value = node.meta[_KEY]
    tensor, wanted = weight(stored), dtype or ir.DataType.FLOAT
    if tensor is None:
        raise AssertionError("unreachable: the sinks are an initializer")
    if tensor.dtype == wanted and len(tensor.shape) == 1:
        return stored
    vector = lazy(lambda: tensor.numpy().reshape(-1).astype(wanted.numpy()), wanted, (tensor.size,))
    return add_initializer(graph, f"{stored.name}.vector", vector)


def _fuse(graph: ir.Graph, attention: SinkAttention) -> None:
    last, sizes = attention.output.producer(), [head_sizes(attention.keys), head_sizes(attention.values)]
    if last is None or sizes[0] is None or sizes[1] is None:
        raise AssertionError("unreachable: keys and values have fixed sizes")
    sinks, pairs = weight(attention.sinks), [appended(attention.keys), appended(attention.values)]
    attributes: dict[str, float | int] = {"q_num_heads": sinks.size if sinks else 0}
    attributes |= {"kv_num_heads": sizes[0][0], "scale": attention.known.scale}
    attributes |= {"softcap": attention.known.softcap} if attention.known.softcap else {}
    caches = [pair for pair in pairs if pair is not None]
    # Attention appends to the caches itself, so it reads what was new in front of the Concat, as [batch,
    # sequence, kv_heads * size]: the value from which the graph split the heads if there is one, else the
    # heads joined again.
    news = [
        joined_source(new, kv_heads * size) or join_heads(last, new)
        for new, (kv_heads, size) in zip(
            [new for _, new in caches] or [attention.keys, attention.values],
            [sizes[0], sizes[1]],
            strict=True,
        )
    ]
    query = attention.query if head_sizes(attention.query) is None else join_heads(last, attention.query)
    operands = [query, *news, attention.mask, *(past for past, _ in caches)]
    fused = insert(last, "Attention", operands, attributes, num_outputs=3 if caches else 1)
    fused.name, fused.meta[_KEY] = last.name, attention.sinks
    result = fused.outputs[0]
    if head_sizes(attention.output) is not None:
        result = split_heads(last, result, int(attributes["q_num_heads"]), sizes[1][1])
    replace(attention.output, result)
    remove_unused(graph, last)
    for old, new in zip((attention.keys, attention.values), fused.outputs[1:], strict=False):
        replace_but_shapes(graph, old, new)


def _separate(graph: ir.Graph, node: ir.Node) -> None:
    """Write softmax over the scores and the sink, without the sink's weight, in groups of query heads."""
    heads, groups = (int_attribute(node, name, 0) for name in ("q_num_heads", "kv_num_heads"))
    queries = heads // groups

    def op(op_type: str, *operands: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert(node, op_type, operands, attributes).outputs[0]

    def ints(*numbers: int) -> ir.Value:
        return shared_constant(graph, "sinks.ints_" + "_".join(map(str, numbers)), np.array(numbers))

    def number(value: float) -> ir.Value:
        return shared_constant(graph, f"sinks.{value!r}", np.array(value, np.float32))

    split = [op("Reshape", x, ints(0, 0, groups, -1)) for x in node.inputs[1:3]]
    parts = [op("Transpose", x, perm=[0, 2, 1, 3]) for x in split]
    if node.inputs[_PAST:]:
        parts = [op("Concat", past, x, axis=2) for past, x in zip(node.inputs[_PAST:], parts, strict=True)]
        for old, new in zip(node.outputs[1:], parts, strict=True):
            replace(old, new)
    rows = op("Reshape", node.inputs[0], ints(0, 0, groups, queries, -1))
    rows = op("Mul", op("Transpose", rows, perm=[0, 2, 3, 1, 4]), number(node.attributes["scale"].as_float()))
    key, value = (op("Unsqueeze", x, ints(2)) for x in parts)
    scores = op("MatMul", rows, op("Transpose", key, perm=[0, 1, 2, 4, 3]))
    if "softcap" in node.attributes:
        cap = number(node.attributes["softcap"].as_float())
        scores = op("Mul", op("Tanh", op("Div", scores, cap)), cap)
    mask = node.inputs[_MASK]
    seen = op("Unsqueeze", mask, ints(1))
    is_bool = mask is not None and mask.dtype == ir.DataType.BOOL
    scores = op("Where", seen, scores, number(LOWEST)) if is_bool else op("Add", scores, seen)
    sink = op("Reshape", node.meta[_KEY], ints(1, groups, queries, 1, 1))
    # The sink takes part in the largest score and in the sum, and has no column among the weights. So the
    # product with the values needs neither a column of zeros nor a cut behind it, and large scores do not
    # overflow.
    largest = op("Max", op("ReduceMax", scores, ints(-1), keepdims=1), sink)
    powers = op("Exp", op("Sub", scores, largest))
    total = op("ReduceSum", powers, ints(-1), keepdims=1)
    total = op("Add", total, op("Exp", op("Sub", sink, largest)))
    mixed = op("Transpose", op("MatMul", op("Div", powers, total), value), perm=[0, 3, 1, 2, 4])
    replace(node.outputs[0], op("Reshape", mixed, ints(0, 0, -1)))
    graph.remove(node, safe=True)
