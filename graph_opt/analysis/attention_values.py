"""Prove that a region of a graph computes attention, and find its scale, softcap and kind of mask."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import reduce
from itertools import product

import numpy as np
import onnx_ir as ir

from ...records import dataclass
from ..graph.edit import weight
from ..graph.lazy import shape_of
from .decoder_inputs import LOWEST
from .probe import contract_feed
from .region import Array, Region, close, region

_MAKING_MASKS = frozenset({"Add", "Sub", "Mul", "Cast", "Not", "Where", "Expand", "Unsqueeze", "Max", "Min"})
_MAX_MASKS = 8  # values upstream of a mask that are tried as the mask


class MaskKind(Enum):
    """How a mask encodes the keys that a token attends to."""

    SEEN = "true for visible keys"
    HIDDEN = "true for hidden keys"
    ADDED = "added to the scores"
    ONES = "1 for visible keys, else 0"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate: attention of ``query`` on ``key`` and ``value``, all [batch, heads, length, head_dim].

    ``query`` and ``output`` may be [batch, length, heads * head_dim] instead. ``sinks`` holds a score per
    query head whose key has no value: an initializer of any shape. The nodes may read the shapes of the graph
    inputs ``sized``. With ``whole`` there are as many queries as keys.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    masks: tuple[ir.Value, ...]
    output: ir.Value
    causal: bool = False
    sinks: ir.Value | None = None
    sized: tuple[ir.Value, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Meaning:
    """The parameters of softmax(softcap(scale * q k) + masks) v; softcap 0 means none.

    With sinks, the softmax is over the scores and the head's sink, and the sink's weight is dropped.
    """

    scale: float
    softcap: float
    masks: tuple[MaskKind, ...]


Heads = tuple[int, int]  # number of heads, head_dim


def meaning(proposal: Proposal, query: Heads, key: Heads, value: Heads) -> Meaning | str:
    """Return the scale, softcap and masks with which a candidate is attention, or why it is not."""
    sinks = () if proposal.sinks is None else (proposal.sinks,)
    tokens = 5 if proposal.causal or proposal.whole else 3
    feed = contract_feed(proposal.sized, past=5 - tokens, new=tokens)
    ends = [value for value in proposal.sized if value.name in feed]
    inputs = [proposal.query, proposal.key, proposal.value, *proposal.masks, *sinks, *ends]
    part = region(inputs, proposal.output, in_float=bool(sinks))
    if isinstance(part, str):
        return part
    if query[0] % key[0] or query[1] != key[1] or key[0] != value[0]:
        return f"{query[0]} query heads of size {query[1]} cannot share {key[0]} key heads of size {key[1]}"
    rng = np.random.default_rng(0)
    # Fewer queries than keys show whether a mask counts from the first token or from the last; a causal one
    # has as many, since Attention aligns is_causal at the first. Random values in two sequences and all
    # heads make it unlikely that another formula gives the same numbers.
    sizes = ((query, tokens), (key, 5), (value, 5))
    arrays = [rng.standard_normal((2, heads, n, size)).astype(np.float32) for (heads, size), n in sizes]
    causal = np.tri(5, dtype=np.bool_) if proposal.causal else np.ones((tokens, 5), np.bool_)
    forms = [list(_forms(mask, rng, tokens)) for mask in proposal.masks]
    scores = [
        rng.standard_normal(shape_of(x)).astype(np.float32) for x in map(weight, sinks) if x is not None
    ]
    fed = [_joined(arrays[0]) if _is_joined(proposal.query) else arrays[0], *arrays[1:]]
    for chosen in product(*forms):
        seen = reduce(np.logical_and, (form.seen for form in chosen), causal[None, None])
        bias = sum((form.bias for form in chosen), np.zeros(1, np.float32))
        result = part(*fed, *(form.content for form in chosen), *scores, *feed.values())
        if part.failure is not None:
            return part.failure
        for scale, cap in _factors(query[1], _numbers(part)):
            wanted = _attention(arrays, seen, bias, scale, cap, *scores)
            if close(result, _joined(wanted) if _is_joined(proposal.output) else wanted):
                return Meaning(scale, cap, tuple(form.kind for form in chosen))
    return "the nodes around its softmax do not compute attention with a known scale and mask"


@dataclass(frozen=True, slots=True)
class _Form:
    """A random mask of one kind: its content, the visible pairs, and the bias of visible pairs."""

    kind: MaskKind
    content: Array
    seen: Array
    bias: Array


def _forms(mask: ir.Value, rng: np.random.Generator, tokens: int) -> Iterator[_Form]:
    """Yield a random mask of each kind that the mask's type allows."""
    seen = rng.random((2, 1, tokens, 5)) < 0.7
    seen[..., 0] = True
    nothing, bias = np.zeros(seen.shape, np.float32), rng.standard_normal(seen.shape).astype(np.float32)
    if mask.dtype == ir.DataType.BOOL:
        yield _Form(MaskKind.SEEN, seen, seen, nothing)
        yield _Form(MaskKind.HIDDEN, ~seen, seen, nothing)
    else:
        yield _Form(MaskKind.ADDED, np.where(seen, bias, LOWEST).astype(np.float32), seen, bias)
        yield _Form(MaskKind.ONES, seen.astype(np.float32), seen, nothing)


def _numbers(part: Region) -> list[float]:
    """Return the scalar constants of a region, and the attributes scale and softcap of its nodes."""
    stated = [node.attributes.get(name) for node in part.nodes for name in ("scale", "softcap")]
    return [*(attribute.as_float() for attribute in stated if attribute is not None), *part.numbers()]


def _factors(size: int, numbers: list[float]) -> Iterator[tuple[float, float]]:
    """Yield scales and softcaps to try: the usual ones, and those derived from the region's constants."""
    scales = [float(size**-0.5), 1.0]
    for number in numbers:
        scales += [number, number * number, 1 / number if number else 1.0]
    scales = list(dict.fromkeys(scale for scale in scales if scale and np.isfinite(scale)))
    caps = [0.0, *dict.fromkeys(number for number in numbers if number > 1)]
    yield from ((scale, cap) for cap in caps for scale in scales)


def mask_candidates(mask: ir.Value) -> list[ir.Value]:
    """Return a mask and the values that it is computed from, as candidates for the mask, nearest first."""
    candidates: dict[ir.Value, None] = {}
    waiting = [mask]
    while waiting and len(candidates) < _MAX_MASKS:
        value = waiting.pop(0)
        node = value.producer()
        if (
            value in candidates
            or value.const_value is not None
            or value.shape is None
            or len(value.shape) < 2
        ):
            continue
        candidates[value] = None
        if node is not None and node.op_type in _MAKING_MASKS and not node.domain:
            waiting += [operand for operand in node.inputs if operand is not None]
    return list(candidates)


def _is_joined(value: ir.Value) -> bool:
    """Return whether a value is [batch, length, heads * head_dim]."""
    return value.shape is not None and len(value.shape) == 3


def _joined(array: Array) -> Array:
    """Convert [batch, heads, length, head_dim] into [batch, length, heads * head_dim]."""
    return array.swapaxes(1, 2).reshape(array.shape[0], array.shape[2], -1)


@np.errstate(over="ignore")  # a number that is tried as the scale may be the lowest float32
def _attention(
    arrays: list[Array], seen: Array, bias: Array, scale: float, cap: float, sinks: Array | None = None
) -> Array:
    query, key, value = (array.astype(np.float64) for array in arrays)
    groups = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, groups, 1), np.repeat(value, groups, 1)
    scores = scale * query @ key.swapaxes(-1, -2)
    scores = np.where(seen, (cap * np.tanh(scores / cap) if cap else scores) + bias, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.reshape(1, -1, 1, 1) - scores.max(-1, keepdims=True))
    return np.asarray(weights / total @ value, np.float32)
