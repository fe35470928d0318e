"""Rewrite attention with sinks as ``Attention``, for targets whose kernels have sinks.

``Attention`` has no input for sinks, so the node holds them in ``meta`` until attention is lowered. No pass
in between may remove unused initializers. A target without sinks keeps the nodes of the portable graph.
"""

from __future__ import annotations

import onnx_ir as ir

from ...analysis.head_layout import head_sizes, join_heads, split_heads
from ...analysis.sink_attention import SinkAttention, appended, joined_source, sink_attentions
from ...graph.edit import add_initializer, insert, remove_unused, replace, replace_but_shapes, weight
from ...graph.lazy import lazy
from ...passes.base import GraphPass

_KEY = "carryall.sinks"  # in the meta of a node: the initializer of its sinks


class SinkAttentionPass(GraphPass):
    """Replace attention with sinks by ``Attention`` with a KV cache; ``sinks_of`` returns its sinks."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every attention whose sinks are an initializer."""
        for found in list(sink_attentions(graph)):
            if isinstance(found, SinkAttention):
                _fuse(graph, found)
                self.fired += 1
            else:
                self.refuse(*found)


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


def _fuse(graph: ir.Graph, found: SinkAttention) -> None:
    last, caches = found.output.producer(), [appended(found.keys), appended(found.values)]
    sizes = [head_sizes(found.keys), head_sizes(found.values)]
    if last is None or caches[0] is None or caches[1] is None or sizes[0] is None or sizes[1] is None:
        raise AssertionError("unreachable: both caches are appended to, with fixed sizes")
    (past_key, new_key), (past_value, new_value) = caches[0], caches[1]
    heads = weight(found.sinks)
    attributes: dict[str, float | int] = {
        "q_num_heads": heads.size if heads else 0,
        "kv_num_heads": sizes[0][0],
    }
    attributes |= {"scale": found.known.scale}
    attributes |= {"softcap": found.known.softcap} if found.known.softcap else {}
    news = [
        joined_source(new, kv_heads * size) or join_heads(last, new)
        for new, (kv_heads, size) in ((new_key, sizes[0]), (new_value, sizes[1]))
    ]
    query = found.query if head_sizes(found.query) is None else join_heads(last, found.query)
    operands = [query, *news, found.mask, past_key, past_value]
    fused = insert(last, "Attention", operands, attributes, num_outputs=3)
    fused.name, fused.meta[_KEY] = last.name, found.sinks
    result = fused.outputs[0]
    if head_sizes(found.output) is not None:
        result = split_heads(last, result, int(attributes["q_num_heads"]), sizes[1][1])
    replace(found.output, result)
    remove_unused(graph, last)
    for old, new in zip((found.keys, found.values), fused.outputs[1:], strict=True):
        replace_but_shapes(graph, old, new)
