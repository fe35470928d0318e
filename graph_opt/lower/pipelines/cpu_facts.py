"""What the provider ``cpu`` must know of a portable graph to choose its options."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ....contract import is_past
from ...analysis.sink_attention import SinkAttention, sink_attentions
from ...graph.edit import nodes_of, static_size
from ..paged_kv import LARGEST_HEAD
from ..products.block_minima import weight_with_minima
from ..products.blocked_weight import BlockedWeight, blocked_weight

_NARROW_BITS = 4  # for 8-bit weights, int8 activations lose more than the rounding of the weights did


def blocks_suffice(model: ir.Model) -> bool:
    """Whether carryall's kernel has all head sizes, and there is attention as one operator.

    Attention of several operators fits no kernel, except attention with sinks.
    """
    nodes = list(nodes_of(model.graph, "Attention"))
    past = [value for value in model.graph.inputs if is_past(value.name)]
    others = _with_sinks(model) if len(past) > 2 * len(nodes) else []
    caches: list[ir.Value | None] = [value for node in nodes for value in node.inputs[4:6]]
    caches += [value for found in others for value in (found.keys, found.values)]
    largest = max((static_size(value, 3) or 0 for value in caches), default=0)
    return bool(nodes or others) and largest <= LARGEST_HEAD


def _with_sinks(model: ir.Model) -> list[SinkAttention]:
    """Return the attentions with sinks of a model that must not be changed."""
    inferred = model.clone()
    # onnxruntime-genai's builder states other shapes of Constant nodes than they have.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(inferred)
    common.ShapeInferencePass()(inferred)
    return [found for found in sink_attentions(inferred.graph) if isinstance(found, SinkAttention)]


def wide_bytes(graph: ir.Graph) -> int:
    """Return the bytes of the second copy of a portable graph's weights; 0 if it would not pay.

    It does not pay if most weights are not int4, or for a mixture of experts, whose experts see few tokens
    each and run in one operator on the stored weights.
    """
    found = [_blocked(node.inputs[1]) for node in nodes_of(graph, "MatMul")]
    weights = [one for one in found if isinstance(one, BlockedWeight)]
    if any(nodes_of(graph, "TopK")):
        return 0
    narrow = sum(one.inputs * one.outputs for one in weights if one.bits == _NARROW_BITS)
    every = sum(one.inputs * one.outputs for one in weights)
    return every if 2 * narrow > every else 0


def _blocked(value: ir.Value | None) -> BlockedWeight | str | None:
    added = weight_with_minima(value)
    return blocked_weight(value) if added is None else added.blocked
