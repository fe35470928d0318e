"""Fuse scaled dot product attention into Attention, including its KV cache if it has one.

Vaswani et al., "Attention Is All You Need" (2017). The search starts at a Softmax, or at an Attention whose
keys are repeated or whose cache is appended outside of it. Operands and masks are found by following the
graph; that the nodes compute attention, and with which scale, is proven by evaluation.
"""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np
import onnx_ir as ir

from ....contract import is_past_encoder
from ...analysis.attention_values import MaskKind, Meaning, Proposal, mask_candidates, meaning
from ...analysis.cache_owner import owner_of
from ...analysis.decoder_inputs import LOWEST
from ...analysis.head_layout import head_sizes, join_heads, split_heads
from ...graph.edit import (
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    replace_but_shapes,
    shared_constant,
    sole_consumer,
)
from ..base import GraphPass

_SCALING = frozenset({"Mul", "Div"})
_PASSING = _SCALING | {"Transpose", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Cast", "Identity"}
_AROUND_SCORES = frozenset({"Add", "Sub", "Mul", "Div", "Tanh", "Cast", "Where", "Max"})
_KEYS = [0, 2, 3, 1]
_SINKS = (
    "its scores are joined with others, such as sinks, for which Attention has no input; "
    "with a KV cache, targets whose kernels have sinks fuse it"
)
_MAX_ADDED = 2  # masks added one after the other, such as a causal and a padding mask


class FuseAttentionPass(GraphPass):
    """Replace attentions that are written as several nodes, or as nodes around an Attention.

    Args:
        plain: do not fuse those with grouped queries, a softcap, a cache, or another type than fp32.
    """

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self._plain = plain
        self._masks: dict[tuple[object, ...], ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every Softmax, and every 4-D Attention without a cache."""
        self._masks = {}
        for node in nodes_of(graph, "Transpose"):
            _split_transpose(graph, node)
        for node in list(graph):
            if node.graph is not graph or node.domain:
                continue
            if node.op_type == "Softmax" and not _is_ranked(node):
                proposals = _around_softmax(node)
            elif node.op_type == "Attention" and _has_no_cache(node):
                proposals = _around_attention(node)
            else:
                continue
            reason = proposals if isinstance(proposals, str) else self._fuse_first(graph, proposals)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)

    def _fuse_first(self, graph: ir.Graph, proposals: list[Proposal]) -> str | None:
        """Fuse the first proposal that is attention; if none is, return why the first is not."""
        reasons = []
        for proposal in proposals:
            sizes = [head_sizes(x) for x in (proposal.query, proposal.key, proposal.value)]
            if sizes[0] is None or sizes[1] is None or sizes[2] is None:
                return "q, k or v is not [batch, heads, length, head_dim] with fixed heads and head_dim"
            known = meaning(proposal, sizes[0], sizes[1], sizes[2])
            if (
                isinstance(known, Meaning)
                and self._plain
                and not _is_plain(proposal, known, sizes[0], sizes[1])
            ):
                return "it has grouped queries, a softcap, a cache, or another type than fp32"
            if isinstance(known, Meaning):
                self._fuse(graph, proposal, known, (sizes[0][0], sizes[1][0], sizes[2][1]))
                return None
            reasons.append(known)
        return reasons[0]

    def _fuse(self, graph: ir.Graph, proposal: Proposal, known: Meaning, sizes: tuple[int, int, int]) -> None:
        last = proposal.output.producer()
        if last is None:
            raise AssertionError("unreachable: the output of an attention has a producer")
        heads, kv_heads, size = sizes
        attributes: dict[str, float | int] = {"q_num_heads": heads, "kv_num_heads": kv_heads}
        attributes |= {"scale": known.scale} | ({"softcap": known.softcap} if known.softcap else {})
        added = [self._additive(graph, *each) for each in zip(proposal.masks, known.masks, strict=True)]
        mask = self._sum_masks(graph, last, added)
        caches = [_appended(proposal.key), _appended(proposal.value)]
        if proposal.causal or caches[0] is None or caches[1] is None:
            operands = [join_heads(last, x) for x in (proposal.query, proposal.key, proposal.value)]
            attributes |= {"is_causal": 1} if proposal.causal else {}
            fused = insert(last, "Attention", [*operands, *([mask] if mask else [])], attributes)
            caches = []
        else:
            (past_key, new_key), (past_value, new_value) = caches[0], caches[1]
            operands = [join_heads(last, x) for x in (proposal.query, new_key, new_value)]
            cached = [*operands, mask, past_key, past_value]
            fused = insert(last, "Attention", cached, attributes, num_outputs=3)
        # The old caches are replaced last: their shapes are read from nodes that go with the output, and the
        # names of outputs of the graph must move to the new values.
        pairs = list(zip((proposal.key, proposal.value), fused.outputs[1:], strict=False))
        for old, new in pairs:
            new.type = old.type
        replace(proposal.output, split_heads(last, fused.outputs[0], heads, size))
        remove_unused(graph, last)
        for old, new in pairs:
            replace_but_shapes(graph, old, new)

    def _sum_masks(self, graph: ir.Graph, before: ir.Node, masks: list[ir.Value]) -> ir.Value | None:
        """Return the sum of additive masks, bounded below by the lowest float32; written once."""
        if len(masks) < 2:
            return masks[0] if masks else None
        key = tuple(masks)
        if key not in self._masks:
            lowest = shared_constant(graph, "mask.lowest", np.array(LOWEST, np.float32))
            total = insert(before, "Add", masks).outputs[0]
            self._masks[key] = insert(before, "Max", [total, lowest]).outputs[0]
            self._masks[key].dtype = ir.DataType.FLOAT
        return self._masks[key]

    def _additive(self, graph: ir.Graph, mask: ir.Value, kind: MaskKind) -> ir.Value:
        """Return a mask as finite numbers to add, so that fully masked rows do not give NaN."""
        if (mask, kind) not in self._masks:
            self._masks[mask, kind] = _as_numbers(graph, mask, kind)
        return self._masks[mask, kind]


def _is_plain(found: Proposal, known: Meaning, query: tuple[int, int], key: tuple[int, int]) -> bool:
    cached = _appended(found.key) is not None or _appended(found.value) is not None
    alike = query[0] == key[0] and found.query.dtype == ir.DataType.FLOAT
    return alike and not known.softcap and not cached


def _split_transpose(graph: ir.Graph, node: ir.Node) -> None:
    """Split a Transpose 0 2 3 1 of keys in two, so that they also exist as [batch, heads, length, size]."""
    source = node.inputs[0]
    if source is None or "perm" not in node.attributes or list(node.attributes["perm"].as_ints()) != _KEYS:
        return
    heads = insert(node, "Transpose", [source], {"perm": [0, 2, 1, 3]}).outputs[0]
    if source.shape is not None:
        heads.shape = ir.Shape([source.shape[axis] for axis in (0, 2, 1, 3)])
    heads.type = source.type
    replace(node.outputs[0], insert(node, "Transpose", [heads], {"perm": [0, 1, 3, 2]}).outputs[0])
    graph.remove(node, safe=True)


def _as_numbers(graph: ir.Graph, mask: ir.Value, kind: MaskKind) -> ir.Value:
    first = next(node for node in graph if any(value is mask for value in node.inputs))
    lowest = shared_constant(graph, "mask.lowest", np.array(LOWEST, np.float32))
    zero = shared_constant(graph, "mask.zero", np.array(0, np.float32))
    seen = mask
    if kind is MaskKind.ONES:
        seen = insert(first, "Cast", [mask], {"to": int(ir.DataType.BOOL)}).outputs[0]
    match kind:
        case MaskKind.ADDED:
            numbers = insert(first, "Max", [mask, lowest]).outputs[0]
        case MaskKind.HIDDEN:
            numbers = insert(first, "Where", [mask, lowest, zero]).outputs[0]
        case _:
            numbers = insert(first, "Where", [seen, zero, lowest]).outputs[0]
    numbers.shape, numbers.dtype = mask.shape, ir.DataType.FLOAT
    return numbers


def _has_no_cache(node: ir.Node) -> bool:
    return all(value is None for value in node.inputs[4:]) and head_sizes(node.inputs[0]) is not None


def _is_ranked(node: ir.Node) -> bool:
    """Return whether only a TopK reads a softmax: it is that of a router of experts."""
    reader = sole_consumer(node.outputs[0])
    return reader is not None and reader.op_type == "TopK"


def _has_sinks(node: ir.Node) -> bool:
    """Return whether a softmax is over scores joined with others along their last axis."""
    value = node.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type == "Concat":
            shape = producer.outputs[0].shape
            return shape is not None and int_attribute(producer, "axis", 0) in (-1, len(shape) - 1)
        value = producer.inputs[0] if producer.op_type in ("Sub", "Cast") else None
    return False


def _around_softmax(node: ir.Node) -> list[Proposal] | str:
    if _has_sinks(node):
        return _SINKS
    scores, masks = _scores_product(node.inputs[0])
    weights = _values_product(node.outputs[0])
    if scores is None or weights is None:
        return "there is no product of q and k before it, or no product with v after it"
    operands = [value for value in (*scores.inputs[:2], weights.inputs[1]) if value is not None]
    query, key, value = (_source(value) for value in operands)
    proposal = Proposal(query, key, value, (), _result(weights))
    if not masks:
        return [proposal]
    forms = [
        mask for mask in mask_candidates(masks[0]) if all(mask in set(mask_candidates(x)) for x in masks[1:])
    ]
    proposals = [changed(proposal, masks=(mask,)) for mask in forms]
    if len(masks) == _MAX_ADDED:
        proposals.append(changed(proposal, masks=tuple(masks)))
    return proposals or f"{len(masks)} values are added to its scores"


def _around_attention(node: ir.Node) -> list[Proposal] | str:
    query, key, value = node.inputs[:3]
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if query is None or key is None or value is None:
        return "it has no query, key or value"
    if len(node.outputs) > 1:
        return "it has more than one output"
    if owner_of(node) is not None:
        return "its keys and values are those of another layer"
    cache = _appended(_source(key))
    if cache is not None and is_past_encoder(cache[0].name):
        return "its keys and values are those of an encoder's rows, which come once"
    causal = bool(int_attribute(node, "is_causal", 0))
    if causal and (cache is not None or mask is not None):
        return "it has is_causal together with a mask or a cache appended outside of it"
    masks = () if mask is None else (mask,)
    return [Proposal(query, _source(key), _source(value), masks, node.outputs[0], causal)]


def _source(value: ir.Value) -> ir.Value:
    """Follow ``value`` upstream through rearrangements and scalings to the farthest 4-D value."""
    best, current = value, value
    while True:
        if head_sizes(current) is not None:
            best = current
        node = current.producer()
        if node is None or node.domain or node.op_type not in _PASSING or _is_end(current):
            return best
        varying = [x for x in node.inputs if x is not None and x.const_value is None]
        first = node.inputs[0] if node.op_type not in _SCALING else next(iter(varying), None)
        if first is None or (node.op_type in _SCALING and len(varying) > 1):
            return best
        current = first


def _is_end(value: ir.Value) -> bool:
    """Return whether a value is a Transpose from [batch, sequence, heads, head_dim], where search ends."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or "perm" not in node.attributes:
        return False
    return list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]


def _scores_product(value: ir.Value | None) -> tuple[ir.Node | None, list[ir.Value]]:
    """Return the MatMul that computes the scores, and the masks added to them."""
    masks: list[ir.Value] = []
    while value is not None:
        node = value.producer()
        if node is None or node.domain:
            break
        if node.op_type == "MatMul":
            return node, masks
        if node.op_type not in _AROUND_SCORES:
            break
        operands = [x for x in node.inputs if x is not None and x.const_value is None]
        scores = [x for x in operands if _holds_product(x)]
        masks += [x for x in operands if x not in scores]
        value = scores[0] if len(scores) == 1 else None
    return None, masks


def _holds_product(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type in _AROUND_SCORES and not node.domain:
        inner = [x for x in node.inputs if x is not None and x.const_value is None]
        found = [x.producer() for x in inner if x.shape is not None and x.shape == node.outputs[0].shape]
        node = found[0] if found else None
    return node is not None and node.op_type == "MatMul"


def _values_product(value: ir.Value) -> ir.Node | None:
    """Return the MatMul with v after the softmax, behind an optional guard against fully masked rows."""
    for _ in range(4):
        readers = [use.node for use in value.uses() if use.node.op_type != "IsNaN"]
        if len(readers) != 1 or readers[0].op_type not in ("Where", "Cast", "MatMul", "Dropout"):
            return None
        if readers[0].op_type == "MatMul":
            return readers[0] if readers[0].inputs[0] is value else None
        value = readers[0].outputs[0]
    return None


def _result(weights: ir.Node) -> ir.Value:
    """Return the result of the product, behind an optional guard that zeroes fully masked rows."""
    output = weights.outputs[0]
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Where" and reader.outputs[0].shape == output.shape:
        return reader.outputs[0]
    return output


def _appended(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the past and the new part of a value that is Concat(past, new) along the length."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if node.attributes["axis"].as_int() not in (2, -2) or past is None or new is None:
        return None
    return (past, new) if past.is_graph_input() else None
