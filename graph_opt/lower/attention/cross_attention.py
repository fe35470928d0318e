"""Lower attention to an encoder's rows to carryall's ``CrossAttention``, whose caches are blocks.

    key = Concat(past_encoder.N.key, heads(k)); Attention(q4, key, value, mask)   ->   CrossAttention(q, k, v,
    ...)

The operator: ``cross_operator.cpp`` in ``providers/native/sources``. A batch has no padding, so the mask
goes.
"""

from __future__ import annotations

import onnx_ir as ir

from ....contract import (
    ENCODER_BEGINS,
    ENCODER_LENGTHS,
    ENCODER_MASK,
    ENCODER_STATES,
    ENCODER_TABLE,
)
from ....errors import UnsupportedAttentionError
from ...analysis.decoder_inputs import encoder_caches, find_input
from ...analysis.head_layout import head_sizes, join_heads
from ...analysis.sink_attention import joined_source
from ...graph.edit import float_attribute, insert, nodes_of, remove_unused, replace
from ...passes.base import GraphPass
from ..paged_kv import BEGINS, BLOCK_SIZE, CACHE_TYPE, CACHE_TYPES, LARGEST_HEAD, LAYOUT, row_bytes
from .shared_cache import joining

DOMAIN, OPERATOR = "carryall", "CrossAttention"


class CrossAttentionPass(GraphPass):
    """Rewrite every attention to the encoder's rows; runs behind ``NativeAttentionPass``.

    Raises:
        UnsupportedAttentionError: the kernel has no such heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._type = "float32"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, with caches of the type that those of its tokens have."""
        self._type = model.metadata_props.get(CACHE_TYPE, self._type)
        return super().call(model)

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite the nodes, then the inputs and outputs of the encoder's rows."""
        pairs = [(node, encoder_caches(node)) for node in nodes_of(graph, "Attention")]
        found = [(node, caches) for node, caches in pairs if caches is not None]
        if not found:
            return
        shapes = {ENCODER_LENGTHS: ["rows"], ENCODER_TABLE: ["rows", "encoder_blocks_per_row"]}
        shapes[ENCODER_BEGINS] = ["rows_and_one"]
        tables = [ir.val(name, ir.DataType.INT32, shape) for name, shape in shapes.items()]
        for node, caches in found:
            self._lower(graph, node, caches, [find_input(graph, BEGINS), *tables])
            self.fired += 1
        graph.inputs.extend(tables)
        mask, rows = (find_input(graph, name) for name in (ENCODER_MASK, ENCODER_STATES))
        if mask is not None and not mask.uses():
            graph.inputs.remove(mask)
        if rows is not None:
            _flatten(rows)

    def _lower(
        self, graph: ir.Graph, node: ir.Node, caches: tuple[ir.Node, ir.Node], tables: list[ir.Value | None]
    ) -> None:
        query, pasts, new = (
            node.inputs[0],
            [one.inputs[0] for one in caches],
            [one.inputs[1] for one in caches],
        )
        sizes, kv_sizes = head_sizes(query), head_sizes(pasts[0])
        if (
            query is None
            or sizes is None
            or kv_sizes is None
            or sizes[1] > LARGEST_HEAD
            or kv_sizes != head_sizes(pasts[1])
        ):
            raise UnsupportedAttentionError(
                f"attention {node.name} has heads of unknown or different sizes, or above {LARGEST_HEAD}"
            )
        width, kv_width = sizes[0] * sizes[1], kv_sizes[0] * kv_sizes[1]
        rows = [
            joined_source(value, kv_width) or join_heads(node, value) for value in new if value is not None
        ]
        operands = [joined_source(query, width) or join_heads(node, query), *rows, *pasts, *tables]
        attributes = {
            "layout": LAYOUT,
            "num_heads": sizes[0],
            "kv_num_heads": kv_sizes[0],
            "head_size": sizes[1],
            "block_size": BLOCK_SIZE,
            "cache_type": CACHE_TYPES[self._type],
            "scale": float_attribute(node, "scale", sizes[1] ** -0.5),
        }
        lowered = insert(node, OPERATOR, operands, attributes, domain=DOMAIN)
        lowered.name = node.name
        last = joining(node.outputs[0], width)
        if last is None:
            raise UnsupportedAttentionError(f"the heads of attention {node.name} are not joined behind it")
        replace(last.outputs[0], lowered.outputs[0])
        for one in caches:
            if one.outputs[0].is_graph_output():
                graph.outputs.remove(one.outputs[0])
        remove_unused(graph, last)
        for past in pasts:
            if past is not None:
                past.type = ir.TensorType(ir.DataType.UINT8)
                past.shape = ir.Shape(
                    ["encoder_blocks", kv_sizes[0], BLOCK_SIZE, row_bytes(sizes[1], self._type)]
                )


def _flatten(rows: ir.Value) -> None:
    """Make the encoder's rows, and what is computed of them up to attention, one flat batch [rows, 1, width].

    A shape that named their axes as those of tokens would let onnxruntime share memory between both.
    """
    waiting = [rows]
    while waiting:
        value = waiting.pop()
        if value.shape is not None:
            value.shape = ir.Shape(["encoder_rows", 1, value.shape[-1]])
        nodes = [use.node for use in value.uses()]
        waiting += [output for node in nodes if node.op_type != OPERATOR for output in node.outputs]
