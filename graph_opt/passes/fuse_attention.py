"""Any way to write scaled dot product attention on cached keys and values -> Attention.

Vaswani et al., "Attention Is All You Need" (2017). The anchor is the Softmax, or an Attention that is fused
already but whose keys are repeated, or whose cache is appended, outside. Scale, mask and repetition are
proposed by following the operands, and proven by evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..edit import insert, remove_unused, replace, shared_constant, sole_consumer
from .base import GraphPass
from .head_layout import head_sizes, join_heads, split_heads
from .region import Array, close, region

_SCALING = frozenset({"Mul", "Div"})
_PASSING = _SCALING | {"Transpose", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Cast", "Identity"}
_AROUND_SCORES = frozenset({"Add", "Mul", "Div", "Tanh", "Cast", "Where"})
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Attention of ``query`` on ``key`` and ``value`` [batch, heads, length, head_dim]."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    output: ir.Value


class FuseAttentionPass(GraphPass):
    """Replace attentions that are spelled out, wholly or around a fused core."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[ir.Value, ir.Value] = {}

    def rewrite(self, graph: ir.Graph) -> None:
        """Look at every Softmax and every Attention without a cache."""
        self._masks = {}
        for node in list(graph):
            if node.graph is not graph or node.domain:
                continue
            if node.op_type == "Softmax":
                found = _around_softmax(node)
            elif node.op_type == "Attention" and _is_bare(node):
                found = _around_attention(node)
            else:
                continue
            reason = found if isinstance(found, str) else self._fuse(graph, found)
            if reason is None:
                self.fired += 1
            else:
                self.refuse(node, reason)

    def _fuse(self, graph: ir.Graph, found: _Proposal) -> str | None:
        query, key, value = (head_sizes(x) for x in (found.query, found.key, found.value))
        if query is None or key is None or value is None:
            return "q, k or v is not [batch, heads, length, head_dim] with fixed heads and head_dim"
        caches = [_appended(found.key), _appended(found.value)]
        if caches[0] is None or caches[1] is None:
            return "its keys and values are not a cache and new ones, joined along the length"
        scale = _scale(found, query, key, value)
        if isinstance(scale, str):
            return scale
        last = found.output.producer()
        if last is None:
            raise AssertionError("unreachable: an attention ends in a node")
        (past_key, new_key), (past_value, new_value) = caches[0], caches[1]
        mask = None if found.mask is None else self._additive(graph, found.mask)
        operands = [join_heads(last, x) for x in (found.query, new_key, new_value)]
        attributes: dict[str, float | int] = {"q_num_heads": query[0], "kv_num_heads": key[0], "scale": scale}
        fused = insert(last, "Attention", [*operands, mask, past_key, past_value], attributes, num_outputs=3)
        for old, new in zip((found.key, found.value), fused.outputs[1:], strict=True):
            new.type = old.type
        replace(found.output, split_heads(last, fused.outputs[0], query[0], value[1]))
        remove_unused(graph, last)
        for old, new in zip((found.key, found.value), fused.outputs[1:], strict=True):
            _replace_cache(graph, old, new)
        return None

    def _additive(self, graph: ir.Graph, mask: ir.Value) -> ir.Value:
        """Return a mask as finite numbers to add, so that a row which sees nothing stays a number."""
        if mask not in self._masks:
            first = next(node for node in graph if any(value is mask for value in node.inputs))
            lowest = shared_constant(graph, "mask.lowest", np.array(_LOWEST, np.float32))
            if mask.dtype == ir.DataType.BOOL:
                zero = shared_constant(graph, "mask.zero", np.array(0, np.float32))
                made = insert(first, "Where", [mask, zero, lowest])
            else:
                made = insert(first, "Max", [mask, lowest])
            made.outputs[0].shape, made.outputs[0].dtype = mask.shape, ir.DataType.FLOAT
            self._masks[mask] = made.outputs[0]
        return self._masks[mask]


def _is_bare(node: ir.Node) -> bool:
    return all(value is None for value in node.inputs[4:]) and head_sizes(node.inputs[0]) is not None


def _around_softmax(node: ir.Node) -> _Proposal | str:
    scores, masks = _product_above(node.inputs[0])
    weights = _product_below(node.outputs[0])
    if scores is None or weights is None:
        return "no product of q and k before it, or of it and v behind it"
    if len(masks) > 1:
        return "more than one value is added to its scores"
    operands = [value for value in (*scores.inputs[:2], weights.inputs[1]) if value is not None]
    query, key, value = (_source(value) for value in operands)
    return _Proposal(query, key, value, masks[0] if masks else None, _result(weights))


def _around_attention(node: ir.Node) -> _Proposal | str:
    if "is_causal" in node.attributes and node.attributes["is_causal"].as_int():
        return "it is causal by attribute, without a cache"
    query, key, value = node.inputs[:3]
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if query is None or key is None or value is None:
        return "it has no query, key or value"
    return _Proposal(query, _source(key), _source(value), mask, node.outputs[0])


def _source(value: ir.Value) -> ir.Value:
    """Return what a value rearranges or scales: the farthest one with its heads on an axis."""
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
    """Whether a transpose from the canonical layout, not of the attention itself, ends the walk."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or "perm" not in node.attributes:
        return False
    return list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]


def _product_above(value: ir.Value | None) -> tuple[ir.Node | None, list[ir.Value]]:
    """Return the product that makes the scores, and what is added to them."""
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


def _product_below(value: ir.Value) -> ir.Node | None:
    """Return the product with v that follows the softmax, past a guard against rows that see nothing."""
    for _ in range(4):
        readers = [use.node for use in value.uses() if use.node.op_type != "IsNaN"]
        if len(readers) != 1 or readers[0].op_type not in ("Where", "Cast", "MatMul", "Dropout"):
            return None
        if readers[0].op_type == "MatMul":
            return readers[0] if readers[0].inputs[0] is value else None
        value = readers[0].outputs[0]
    return None


def _result(weights: ir.Node) -> ir.Value:
    """Return the product, past a guard that zeroes rows which see nothing."""
    output = weights.outputs[0]
    reader = sole_consumer(output)
    if reader is not None and reader.op_type == "Where" and reader.outputs[0].shape == output.shape:
        return reader.outputs[0]
    return output


def _appended(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return cache and new part of a value that joins them along the length."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if node.attributes["axis"].as_int() not in (2, -2) or past is None or new is None:
        return None
    return (past, new) if past.is_graph_input() else None


def _scale(
    found: _Proposal, query: tuple[int, int], key: tuple[int, int], value: tuple[int, int]
) -> float | str:
    """Return the scale with which a proposal is attention, or why it is not."""
    inputs = [x for x in (found.query, found.key, found.value, found.mask) if x is not None]
    part = region(inputs, found.output)
    if isinstance(part, str):
        return part
    if query[0] % key[0] or query[1] != key[1] or key[0] != value[0]:
        return f"{query[0]} heads of size {query[1]} cannot share {key[0]} of size {key[1]}"
    rng = np.random.default_rng(0)
    sizes = ((query, 3), (key, 5), (value, 5))
    arrays = [rng.standard_normal((2, heads, n, size)).astype(np.float32) for (heads, size), n in sizes]
    seen = rng.random((2, 1, 3, 5)) < 0.7
    seen[..., 0] = True
    given: list[Array] = list(arrays)
    if found.mask is not None:
        given.append(seen if found.mask.dtype == ir.DataType.BOOL else _additive_array(seen))
    else:
        seen[:] = True
    result = part(*given)
    for scale in _scales(query[1], part.constants):
        if close(result, _attention(arrays, seen, scale)):
            return scale
    return "what surrounds its softmax is no attention of q on k and v by a known scale"


def _additive_array(seen: Array) -> Array:
    return np.where(seen, 0, _LOWEST).astype(np.float32)


def _scales(size: int, constants: Sequence[ir.Value]) -> list[float]:
    """Return the scales to try: the usual, and products of the constants in the region."""
    numbers = [1.0]
    for value in constants:
        content = None if value.const_value is None else value.const_value.numpy()
        if content is not None and content.size == 1 and content.dtype.kind == "f":
            number = float(content.item())
            numbers += [number, number * number, 1 / number if number else 1.0]
    return list(dict.fromkeys([float(size**-0.5), *(n for n in numbers if np.isfinite(n))]))


def _attention(arrays: list[Array], seen: Array, scale: float) -> Array:
    query, key, value = (array.astype(np.float64) for array in arrays)
    groups = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, groups, 1), np.repeat(value, groups, 1)
    scores = np.where(seen, scale * query @ key.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights @ value, np.float32)


def _replace_cache(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    producer = old.producer()
    new.shape = old.shape
    replace(old, new)
    remove_unused(graph, producer)
