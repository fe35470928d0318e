"""What the masks of text encoders mean, found by evaluating them on padded texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS
from ....errors import GraphError, UnsupportedAttentionError
from ....records import dataclass
from ...analysis.known_masks import integers_upstream
from ...analysis.probe import Probe, inputs_of
from ...graph.edit import int_attribute, weight
from ...graph.lazy import Array
from .near_products import NearProducts, gathered_products, given, near_products, upstream

Floats = npt.NDArray[np.float32]
TEXT_INPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
_HIDDEN = -1e4  # a mask entry at or below this hides its key
_SHORT, _BIASED, _LONGEST = 64, 512, 2048  # tokens of a mask that is evaluated; at least, of one with biases


@dataclass(frozen=True, slots=True)
class TextMask:
    """What a mask does besides hiding padding.

    Args:
        window: the largest distance of two tokens that attend to each other; None for any.
        near: what is added to scores by the distance of key and query from -reach to reach, float32 [1 or
            heads, 2 * reach + 1]; larger distances count as reach; None for nothing.
        causal: whether a token sees those in front of it and itself only.
        products: what is added to scores by products with embeddings of distances; None for nothing.
    """

    window: int | None = None
    near: Floats | None = None
    causal: bool = False
    products: NearProducts | None = None


def text_masks(graph: ir.Graph, attentions: Sequence[ir.Node], context_length: int) -> list[TextMask]:
    """Return the meaning of the mask of each attention; masks that layers share are evaluated once.

    Args:
        graph: the graph.
        attentions: its attentions.
        context_length: tokens of the longest text; 0 if that is not known.

    Raises:
        UnsupportedAttentionError: a mask means something else, or attention is causal or has a cache.
    """
    known: dict[ir.Value | None, TextMask] = {}
    for node in attentions:
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        if any(value is not None for value in inputs[4:]) or int_attribute(node, "is_causal", 0):
            raise UnsupportedAttentionError(f"attention {node.name} is causal or has a cache")
        mask = inputs[3]
        if mask not in known:
            try:
                known[mask] = TextMask() if mask is None else _mask_of(graph, node, mask, context_length)
            except (GraphError, ValueError, IndexError) as error:
                raise UnsupportedAttentionError(f"attention {node.name}: its mask {error}") from error
    return [known[(*node.inputs, None, None)[3]] for node in attentions]


def _mask_of(graph: ir.Graph, node: ir.Node, mask: ir.Value, context_length: int) -> TextMask:
    gathered = gathered_products(mask)
    if not gathered:
        return text_mask(graph, mask)
    meaning = text_mask(
        graph, mask, [each.outputs[0] for each in gathered], int_attribute(node, "q_num_heads", 0)
    )
    if meaning.near is not None:
        raise ValueError("adds a bias beside products by distance")
    return replace(meaning, products=near_products(graph, node, gathered, context_length))


def text_mask(graph: ir.Graph, mask: ir.Value, parts: Sequence[ir.Value] = (), heads: int = 0) -> TextMask:
    """Return the meaning of a mask, which is evaluated on texts of several lengths, padded on the right.

    Distances are compared with integer constants and with the lengths of tables upstream, and the evaluation
    is longer than all of these; so what it shows of the largest distances holds for all larger ones. Where a
    bias by distance ends may be part of a formula, so it must not change over half of the distances.

    Args:
        graph: the graph.
        mask: the mask.
        parts: values [batch, heads, sequence, sequence] that are evaluated as 0.
        heads: of the parts.

    Raises:
        ValueError: the mask means something else; the message goes on behind "its mask".
        GraphError: it cannot be evaluated.
    """
    sources = [value for value in inputs_of(mask, parts) if value not in parts]
    if any(value.name not in TEXT_INPUTS for value in sources) or _has_products(mask, parts):
        raise ValueError("depends on more than padding and distance")
    sizes = [*integers_upstream(mask, parts), *_table_sizes(mask, parts)]
    length = max([_SHORT, *(2 * size + 8 for size in sizes)])
    if length > _LONGEST:
        raise ValueError(f"has a constant above {_LONGEST // 2}")
    probe = Probe(graph, mask, parts)

    def without_parts(feed: Mapping[str, Array]) -> Array:
        tokens = next(iter(feed.values())).shape
        scores = np.zeros((tokens[0], heads, tokens[1], tokens[1]), np.float32)
        return probe({**feed, **{str(part.name): scores for part in parts}})

    meaning = _meaning_at(without_parts, length)
    while meaning.near is not None and (length < _BIASED or meaning.near.shape[1] // 2 > length // 2):
        if length == _LONGEST:
            raise ValueError("adds a bias that goes on with the distance")
        length = min(max(_BIASED, 2 * length), _LONGEST)
        meaning = _meaning_at(without_parts, length)
    return meaning


def _meaning_at(probe: Callable[[Mapping[str, Array]], Array], length: int) -> TextMask:
    """Return the meaning of a mask for texts of up to ``length`` tokens.

    Raises:
        ValueError: see ``text_mask``.
        GraphError: see ``text_mask``.
    """
    real = np.arange(length) < np.array([length, length - 7, 3])[:, None]
    zeros = np.zeros(real.shape, np.int64)
    given = {ATTENTION_MASK: real.astype(np.int64), INPUT_IDS: zeros + 1}
    values, others = (probe({**given, TOKEN_TYPE_IDS: types}) for types in (zeros, zeros + 1))
    if (values != others).any():
        raise ValueError("depends on the types of tokens")
    values = np.where(values, 0.0, 2 * _HIDDEN) if values.dtype == np.bool_ else values
    values = np.broadcast_to(values, (3, values.shape[1], length, length)).astype(np.float32)
    seen = values > _HIDDEN
    places = np.arange(length) - np.arange(length)[:, None]
    queries = np.broadcast_to(real[:, None, :, None], seen.shape)
    if (seen == ((places <= 0) & real[:, None, None, :]))[queries].all() and not values[seen].any():
        return TextMask(causal=True)
    window = int(seen[0, 0, 0].sum()) - 1
    expected = (np.abs(places) <= window) & real[:, None, None, :]
    if (seen != expected)[queries].any():
        raise ValueError("hides other tokens than padding and distant ones")
    limit = None if window == length - 1 else window
    if not (values[seen] != 0).any():
        return TextMask(limit)
    if limit is not None:
        raise ValueError("has a window and a bias")
    near = np.concatenate(
        [values[0, :, -1], values[0, :, 0, 1:]], axis=1
    )  # by distance from -(length - 1) on
    if (values != near[:, places + length - 1][None])[np.broadcast_to(expected, seen.shape)].any():
        raise ValueError("adds a bias that does not depend on the distance alone")
    while near.shape[1] > 3 and all(
        (near[:, end] == near[:, inner]).all() for end, inner in ((0, 1), (-1, -2))
    ):
        near = near[:, 1:-1]
    return TextMask(None, near)


def _table_sizes(mask: ir.Value, parts: Sequence[ir.Value]) -> list[int]:
    """Return half of the lengths of tables upstream of a mask, which hold distances in both directions."""
    tensors = [weight(value) for node in upstream(mask, known=parts) for value in given(node)]
    return sorted(
        {-(-size // 2) for tensor in tensors if tensor is not None for size in tensor.shape.numpy()}
    )


def _has_products(value: ir.Value, parts: Sequence[ir.Value]) -> bool:
    return any(node.op_type in ("MatMul", "Gemm", "Attention") for node in upstream(value, known=parts))
