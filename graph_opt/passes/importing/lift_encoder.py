"""Replace onnxruntime's fused operators of text encoders by standard ones.

onnxruntime's optimizer of transformers writes them, also into fastembed's files ``model_optimized.onnx``.
Definitions: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ...graph.edit import (
    MICROSOFT,
    constant,
    float_attribute,
    insert,
    int_attribute,
    remove_unused,
    replace,
    shared_constant,
    static_size,
)
from ..base import GraphPass
from .lift_products import integer_product

_EPSILON = 1e-12
_HIDDEN = float(np.finfo(np.float32).min)
_QUICK = 1.702  # the default of QuickGelu

_EMBEDDINGS = frozenset({"EmbedLayerNormalization", "QEmbedLayerNormalization"})

Inputs = list[ir.Value | None]


class LiftEncoderPass(GraphPass):
    """Replace norms of embeddings and of sums, attention with packed inputs or without, and kinds of Gelu."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[ir.Value, ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Replace every operator whose options standard ones have."""
        self._masks = {}
        lifts: dict[str, Callable[[ir.Graph, ir.Node, Inputs], ir.Value | str]] = {
            "EmbedLayerNormalization": _embedded,
            "QEmbedLayerNormalization": _embedded_integers,
            "Attention": self._packed_attention,
            "QAttention": self._integer_attention,
            "MultiHeadAttention": self._attention,
            "SkipLayerNormalization": _normed_sum,
            "BiasGelu": _gelu,
            "Gelu": _gelu,
            "FastGelu": _gelu,
            "QuickGelu": _quick_gelu,
        }
        for node in list(graph):
            if node.domain != MICROSOFT or node.op_type not in lifts:
                continue
            inputs = [*node.inputs, *[None] * 10]
            if node.op_type in _EMBEDDINGS and len(node.outputs) > 1 and inputs[7] is not None:
                # The number of tokens of each text: what a mask says where padding is behind the text.
                replace(node.outputs[1], inputs[7])
            others = [output for output in node.outputs[1:] if output.uses() or output.is_graph_output()]
            lifted = "a further output of it is used" if others else lifts[node.op_type](graph, node, inputs)
            if isinstance(lifted, str):
                self.refuse(node, lifted)
                continue
            if producer := lifted.producer():
                producer.name = node.name
            replace(node.outputs[0], lifted)
            remove_unused(graph, node)
            self.fired += 1

    def _packed_attention(self, graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value | str:
        """Return attention whose queries, keys and values are one product."""
        x, weights, bias, mask, past, scores = inputs[:6]
        if past is not None or scores is not None or "qkv_hidden_sizes" in node.attributes:
            return "it has a past, a bias of scores, or parts of different sizes"
        product = insert(node, "MatMul", [x, weights]).outputs[0]
        return self._parts_attended(graph, node, product, [weights, bias], mask)

    def _integer_attention(self, graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value | str:
        """Return attention whose queries, keys and values are one product of rounded inputs."""
        x, weights, bias, scale, scales, mask, zero, zeros, past = inputs[:9]
        if past is not None:
            return "it has a past"
        product = integer_product(node, [x, weights, zero, zeros], scale, scales)
        return self._parts_attended(graph, node, product, [weights, bias], mask)

    def _parts_attended(
        self,
        graph: ir.Graph,
        node: ir.Node,
        product: ir.Value,
        weights: Inputs,
        mask: ir.Value | None,
    ) -> ir.Value | str:
        """Return attention of a product of all three; ``weights`` are those of it, and its bias."""
        matrix, bias = weights
        width = static_size(matrix, 1)
        if not width:
            return "the size of its weights is not known"
        if bias is not None:
            product = insert(node, "Add", [product, bias]).outputs[0]
        size = shared_constant(graph, f"three_parts_{width}", np.full(3, width // 3, np.int64))
        parts = insert(node, "Split", [product, size], {"axis": -1}, num_outputs=3).outputs
        return self._attended(graph, node, list(parts), mask)

    def _attention(self, graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value | str:
        """Return attention of three values [batch, sequence, hidden]."""
        query, key, value, bias, mask = inputs[:5]
        if key is None or value is None or any(each is not None for each in (bias, *inputs[5:])):
            return "it has packed inputs, a bias or a past"
        return self._attended(graph, node, [query, key, value], mask)

    def _attended(
        self, graph: ir.Graph, node: ir.Node, parts: Inputs, mask: ir.Value | None
    ) -> ir.Value | str:
        if int_attribute(node, "unidirectional", 0) or int_attribute(node, "do_rotary", 0):
            return "it is causal or rotates"
        heads = int_attribute(node, "num_heads", 0)
        attributes: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads}
        if scale := float_attribute(node, "scale", 0.0):
            attributes["scale"] = scale
        mask = _mask_of_counts(mask)
        if mask is not None:
            if mask.shape is None or len(mask.shape) != 2:
                return "its mask is not [batch, sequence]"
            if mask not in self._masks:
                self._masks[mask] = _additive(graph, node, mask)
            parts = [*parts, self._masks[mask]]
        return insert(node, "Attention", parts, attributes).outputs[0]


def _mask_of_counts(mask: ir.Value | None) -> ir.Value | None:
    """Return the mask [batch, sequence] whose sums are the numbers of tokens [batch] of texts.

    Both hide the same keys where padding is behind the texts.
    """
    node = None if mask is None else mask.producer()
    if node is None or node.op_type != "ReduceSum" or int_attribute(node, "keepdims", 1):
        return mask
    axes = [int(axis) for axis in node.attributes["axes"].as_ints()] if "axes" in node.attributes else None
    stated = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = axes if stated is None else stated.reshape(-1).tolist()
    return node.inputs[0] if axes == [1] else mask


def _additive(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> ir.Value:
    """Return what is added to scores, [batch, 1, sequence, sequence], by a mask of keys [batch, sequence]."""
    axes = shared_constant(graph, "axes_1_2", np.array([1, 2], np.int64))
    one = shared_constant(graph, "one", np.array([1], np.int64))
    zero = shared_constant(graph, "visible", np.array(0, np.float32))
    hidden = shared_constant(graph, "hidden", np.array(_HIDDEN, np.float32))
    seen = insert(node, "Cast", [mask], {"to": ir.DataType.BOOL}).outputs[0]
    seen = insert(node, "Unsqueeze", [seen, axes]).outputs[0]
    added = insert(node, "Where", [seen, zero, hidden]).outputs[0]
    sizes = [insert(node, "Shape", [mask], {"start": axis, "end": axis + 1}).outputs[0] for axis in (0, 1)]
    shape = insert(node, "Concat", [sizes[0], one, sizes[1], sizes[1]], {"axis": 0}).outputs[0]
    return insert(node, "Expand", [added, shape]).outputs[0]


def _embedded_integers(graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value | str:
    """Return what ``_embedded`` does, of tables and a norm that are stored as integers."""
    tables, (mask, *scales) = inputs[:7], inputs[7:13]
    zeros = [*inputs[13:18]]
    norm = [
        insert(node, "DequantizeLinear", [tables[5 + place], scales[3 + place], zeros[3 + place]]).outputs[0]
        for place in (0, 1)
    ]
    return _embedded(graph, node, [*tables[:5], *norm, mask, None], scales[:3], zeros[:3])


def _rows(
    node: ir.Node, table: ir.Value | None, ids: ir.Value | None, scale: ir.Value | None, zero: ir.Value | None
) -> ir.Value:
    """Return rows of a table; with a scale, of stored integers."""
    rows = insert(node, "Gather", [table, ids]).outputs[0]
    return rows if scale is None else insert(node, "DequantizeLinear", [rows, scale, zero]).outputs[0]


def _embedded(
    graph: ir.Graph, node: ir.Node, inputs: Inputs, scales: Inputs | None = None, zeros: Inputs | None = None
) -> ir.Value | str:
    """Return the normalized sum of the embeddings of tokens, positions and types."""
    ids, types, words, places, kinds, gamma, beta, _, positions = inputs[:9]
    if positions is None:
        zero, one = (shared_constant(graph, f"number_{n}", np.array(n, np.int64)) for n in (0, 1))
        length = insert(node, "Shape", [ids], {"start": 1, "end": 2}).outputs[0]
        length = insert(node, "Squeeze", [length]).outputs[0]
        positions = insert(node, "Range", [zero, length, one]).outputs[0]
    scales, zeros = scales or [None] * 3, zeros or [None] * 3
    total = _rows(node, words, ids, scales[0], zeros[0])
    if kinds is not None:
        if types is None:
            return "it has a table of types, but no types"
        total = insert(node, "Add", [total, _rows(node, kinds, types, scales[2], zeros[2])]).outputs[0]
    total = insert(node, "Add", [total, _rows(node, places, positions, scales[1], zeros[1])]).outputs[0]
    attributes = {"axis": -1, "epsilon": float_attribute(node, "epsilon", _EPSILON)}
    return insert(node, "LayerNormalization", [total, gamma, beta], attributes).outputs[0]


def _normed_sum(graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value | str:
    """Return the norm of a sum; the bias is that of the product in front, as other graphs write it."""
    left, right, gamma, beta, bias = inputs[:5]
    if left is None or right is None:
        return "it has one summand"
    if bias is not None:
        producer = right.producer()
        if producer is not None and producer.op_type == "MatMul":
            left, right = right, left
        left = insert(node, "Add", [left, bias]).outputs[0]
    total = insert(node, "Add", [left, right]).outputs[0]
    attributes = {"axis": -1, "epsilon": float_attribute(node, "epsilon", _EPSILON)}
    return insert(node, "LayerNormalization", [total, gamma, beta], attributes).outputs[0]


def _gelu(graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value:
    x, bias = inputs[:2]
    if bias is not None:
        x = insert(node, "Add", [x, bias]).outputs[0]
    attributes = {"approximate": "tanh"} if node.op_type == "FastGelu" else {}
    return insert(node, "Gelu", [x], attributes).outputs[0]


def _quick_gelu(graph: ir.Graph, node: ir.Node, inputs: Inputs) -> ir.Value:
    alpha = float_attribute(node, "alpha", _QUICK)
    factor = shared_constant(graph, f"alpha_{alpha}", np.array(alpha, np.float32))
    scaled = insert(node, "Mul", [inputs[0], factor]).outputs[0]
    return insert(node, "Mul", [inputs[0], insert(node, "Sigmoid", [scaled]).outputs[0]]).outputs[0]
