"""Give attention to the present keys and values of an earlier layer the form of that layer's own attention.

    Attention(q4, present.N.key, present.N.value, mask) -> Attention(q3, k, v, mask, past.N.key, past.N.value)

Kernels that keep KV in blocks then read the cache of layer N. The new node computes the same present keys and
values again, which nobody reads; ``reads_only`` tells lowerings that its cache is written by layer N.
"""

from __future__ import annotations

import onnx_ir as ir

from ...analysis.cache_owner import owner_of
from ...analysis.head_layout import head_sizes, join_heads, split_heads
from ...analysis.sink_attention import joined_source
from ...graph.edit import insert, nodes_of, remove_unused, replace, static_size
from ...passes.base import GraphPass

_KEY = "carryall.reads_only"  # in the meta of a node


class SharedCachePass(GraphPass):
    """Rewrite every 4-D ``Attention`` to the present of another; runs before attention is lowered."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes."""
        for node in nodes_of(graph, "Attention"):
            owner = owner_of(node)
            if owner is None:
                continue
            query = node.inputs[0]
            sizes = head_sizes(query)
            if query is None or sizes is None or owner.inputs[4] is None:
                self.refuse(
                    node, "its query is not [batch, heads, sequence, size], or its owner has no cache"
                )
                continue
            mask = node.inputs[3] if len(node.inputs) > 3 else None
            width = sizes[0] * sizes[1]
            joined = joined_source(query, width) or join_heads(node, query)
            operands = [joined, *owner.inputs[1:3], mask, *owner.inputs[4:6]]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            attributes |= {"q_num_heads": sizes[0], "kv_num_heads": owner.attributes["kv_num_heads"].as_int()}
            shared = insert(node, "Attention", operands, attributes)
            shared.name = node.name
            shared.meta[_KEY] = True
            last = joining(node.outputs[0], width)
            if last is None:
                replace(node.outputs[0], split_heads(node, shared.outputs[0], *sizes))
            else:
                replace(last.outputs[0], shared.outputs[0])
            remove_unused(graph, node if last is None else last)
            self.fired += 1


def joining(value: ir.Value, width: int) -> ir.Node | None:
    """Return the Reshape to [batch, sequence, width], if nothing else reads ``value`` [batch, heads, ...]."""
    node = _only_reader(value)
    if node is None or node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
        return None
    last = _only_reader(node.outputs[0])
    if last is None or last.op_type != "Reshape" or len(last.outputs[0].shape or ()) != 3:
        return None
    return last if static_size(last.outputs[0], 2) == width else None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def reads_only(node: ir.Node) -> bool:
    """Return whether an earlier attention writes the cache that ``node`` reads."""
    return _KEY in node.meta
