"""Find attention with sinks: several nodes, because ``Attention`` has no sinks.

A sink is a score of a query head whose key has no value. It joins the softmax, and its weight is dropped
(gpt-oss, https://arxiv.org/abs/2508.10925). The search starts at the products that read keys and values.
Operands and masks are found by following the graph. That the nodes compute attention, and with which scale,
is proven by evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import onnx_ir as ir

from ...contract import is_past
from ...records import dataclass
from ..graph.edit import int_attribute, nodes_of, static_size, weight
from .attention_values import MaskKind, Meaning, Proposal, mask_candidates, meaning
from .head_layout import head_sizes
from .region import region

_PASSING = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SCALING = frozenset({"Div", "Mul"})
_AROUND_SCORES = _PASSING | {
    *("Add", "Concat", "Div", "Exp", "Max", "Mul", "ReduceMax", "ReduceSum", "Slice", "Softmax", "Split"),
    *("Sub", "Tanh", "Where"),
}
_MAX_VALUES = 64  # values between the two products


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """Attention with sinks; ``query`` and ``output`` as in ``Proposal``.

    Args:
        keys: the key cache with the new keys, [batch, kv_heads, total, head_dim]; only these without a cache.
        values: the same of the values.
        mask: the mask, added to the scores or true for visible keys.
        sinks: the initializer of the sinks, a score for each query head.
        known: scale and softcap.
    """

    query: ir.Value
    keys: ir.Value
    values: ir.Value
    mask: ir.Value
    sinks: ir.Value
    output: ir.Value
    known: Meaning


def sink_attentions(graph: ir.Graph, *, cached: bool = True) -> Iterator[SinkAttention | tuple[ir.Node, str]]:
    """Yield each attention with sinks, and the last node of each near miss with the reason.

    Args:
        graph: the graph.
        cached: search for attention on a KV cache; otherwise for that of whole sequences.
    """
    read = _cache if cached else _heads
    reads = {node: read(node.inputs[1]) for node in nodes_of(graph, "MatMul")}
    products = {node: heads for node, heads in reads.items() if heads is not None}
    for node, values in products.items():
        between = _upstream(node.inputs[0], {other.outputs[0] for other in products})
        scores = [value for value in between if value.producer() in products]
        if len(scores) != 1:
            continue
        first = next(other for other in products if other.outputs[0] is scores[0])
        keys, around = products[first], _operands(scores[0], between)
        query = _query(first.inputs[0], head_sizes(keys))
        heads = 0 if query is None else query[1]
        stored = dict.fromkeys(x for x in map(_stored, around) if x is not None)
        varying = [x for x in around if _stored(x) is None]
        sinks = [x for x in stored if (tensor := weight(x)) is not None and tensor.size == heads]
        if query is not None and sinks:
            found = Proposal(query[0], keys, values, (), node.outputs[0], whole=not cached)
            yield _proven(node, found, heads, varying, sinks)


def _cache(value: ir.Value | None) -> ir.Value | None:
    """Return the KV cache with new keys or values that ``value`` rearranges, None if there is none."""
    source = _passed(value, _PASSING)
    return None if source is None or appended(source) is None else source


def _heads(value: ir.Value | None, passing: frozenset[str] = _PASSING) -> ir.Value | None:
    """Return the farthest value [batch, heads, length, head_dim] that ``value`` rearranges, else None."""
    found = [each for each in _chain(value, passing) if head_sizes(each) is not None]
    return found[-1] if found else None


def appended(cache: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the past and the new part of a value that is Concat(past, new) along the length, else None."""
    node = cache.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or not is_past(past.name) or int_attribute(node, "axis", 0) not in (2, -2):
        return None
    return past, new


def joined_source(value: ir.Value, width: int) -> ir.Value | None:
    """Return [batch, length, heads * head_dim] from which ``value`` [batch, heads, length, head_dim] comes.

    None if there is no such value. Evaluation proves that the nodes between only rearrange.
    """
    source, heads = _farthest_joined(value, width, _PASSING), head_sizes(value)
    part = "" if source is None or heads is None else region([source], value)
    if source is None or heads is None or isinstance(part, str):
        return None
    array = np.random.default_rng(0).standard_normal((2, 3, width)).astype(np.float32)
    wanted = array.reshape(2, 3, *heads).swapaxes(1, 2)
    return source if np.array_equal(part(array), wanted) else None


def _proven(
    last: ir.Node,
    proposal: Proposal,
    heads: int,
    varying: list[ir.Value],
    sinks: list[ir.Value],
) -> SinkAttention | tuple[ir.Node, str]:
    """Return the attention whose last product is ``last``, or why it is none.

    Args:
        last: the product with the values.
        proposal: the candidate without its mask and sinks.
        heads: number of query heads.
        varying: values that are computed apart from the scores and meet them; one holds the mask.
        sinks: candidates.
    """
    key, value = head_sizes(proposal.key), head_sizes(proposal.value)
    if key is None or value is None:
        return last, "the heads of its cache are not fixed"
    masks = [form for x in varying for form in mask_candidates(x) if form.shape is not None]
    masks = [form for form in masks if len(form.shape or ()) == 4]
    output, reason = (
        _result(last.outputs[0], heads * value[1]),
        "it adds no mask [batch, heads, length, total]",
    )
    sized = () if last.graph is None else tuple(last.graph.inputs)
    for sink, mask in product(sinks, dict.fromkeys(masks)):
        tried = replace(proposal, masks=(mask,), output=output, sinks=sink, sized=sized)
        known = meaning(tried, (heads, key[1]), key, value)
        if isinstance(known, Meaning) and known.masks[0] in (MaskKind.ADDED, MaskKind.SEEN):
            return SinkAttention(proposal.query, proposal.key, proposal.value, mask, sink, output, known)
        reason = known if isinstance(known, str) else "its mask is not added to the scores"
    return last, reason


def _query(value: ir.Value | None, key: tuple[int, int] | None) -> tuple[ir.Value, int] | None:
    """Return the query [batch, length, heads * size] or [batch, heads, length, size], and its heads."""
    if value is None or key is None:
        return None
    passing = _PASSING | _SCALING
    joined = _farthest_joined(value, None, passing)
    width = static_size(joined, 2)
    if joined is not None and width is not None and width % key[1] == 0:
        return joined, width // key[1]
    apart = _heads(value, passing)
    sizes = head_sizes(apart)
    return None if apart is None or sizes is None or sizes[1] != key[1] else (apart, sizes[0])


def _upstream(value: ir.Value | None, ends: set[ir.Value]) -> dict[ir.Value, None]:
    """Return ``value`` and those it is computed from by operators around scores, as far as ``ends``."""
    values: dict[ir.Value, None] = {}
    waiting = [value]
    while waiting and len(values) < _MAX_VALUES:
        current = waiting.pop(0)
        node = None if current is None else current.producer()
        if current is None or current in values:
            continue
        values[current] = None
        if current not in ends and node is not None and node.op_type in _AROUND_SCORES and not node.domain:
            waiting += node.inputs
    return values


def _operands(scores: ir.Value, between: dict[ir.Value, None]) -> list[ir.Value]:
    """Return the values that the nodes after ``scores`` read besides what they compute from them."""
    inner, operands = {scores}, dict[ir.Value, None]()
    waiting = [scores]
    while waiting:
        for use in waiting.pop().uses():
            made = [value for value in use.node.outputs if value in between and value not in inner]
            if made:
                inner.update(made)
                waiting += made
                operands |= dict.fromkeys(value for value in use.node.inputs if value is not None)
    return [value for value in operands if value not in inner]


def _stored(value: ir.Value) -> ir.Value | None:
    """Return the float initializer of which ``value`` is a rearrangement, None if there is none."""
    source = _passed(value, _PASSING)
    tensor = weight(source)
    return source if tensor is not None and tensor.dtype.is_floating_point() and tensor.size else None


def _passed(value: ir.Value | None, passing: frozenset[str]) -> ir.Value | None:
    """Follow ``value`` upstream through operators that rearrange or scale."""
    *_, last = _chain(value, passing)
    return last


def _farthest_joined(value: ir.Value, width: int | None, passing: frozenset[str]) -> ir.Value | None:
    """Return the farthest value [batch, length, width] on the way that ``_passed`` follows."""
    found = [x for x in _chain(value, passing) if x is not None and x.shape is not None and len(x.shape) == 3]
    found = [x for x in found if width is None or static_size(x, 2) == width]
    return found[-1] if found else None


def _chain(value: ir.Value | None, passing: frozenset[str]) -> Iterator[ir.Value | None]:
    """Yield ``value`` and the values upstream of it through operators that rearrange or scale."""
    while True:
        yield value
        node = None if value is None else value.producer()
        if node is None or node.domain or node.op_type not in passing:
            return
        varying = [x for x in node.inputs if x is not None and x.const_value is None]
        value = node.inputs[0] if node.op_type not in _SCALING else next(iter(varying), None)


def _result(value: ir.Value, width: int) -> ir.Value:
    """Return the result of attention as [batch, length, width] if later nodes give it that form."""
    best = value
    while (reader := _only_reader(value)) is not None and reader.op_type in _PASSING:
        value = reader.outputs[0]
        if static_size(value, 2) == width and value.shape is not None and len(value.shape) == 3:
            best = value
    return best


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    alone = len(uses) == 1 and not value.is_graph_output() and uses[0].idx == 0
    return uses[0].node if alone and not uses[0].node.domain else None
