"""Fuse attention of RMSNormalization(q), RMSNormalization(k) and v into one kernel.

The kernel normalises every head of q and k before the rotary embedding. Two inputs hold the scales; only
CUDA's kernels support them.
"""

from __future__ import annotations

import onnx_ir as ir

from ....records import dataclass
from ...graph.edit import (
    MICROSOFT,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    static_size,
    weight,
)
from ...passes.base import GraphPass
from .kv_int8 import CacheScales

# The inputs for the scales of q and k.
_WEIGHTS = {"GroupQueryAttention": (14, 15), "PagedAttention": (12, 13)}


@dataclass(frozen=True, slots=True)
class _HeadNorm:
    """The parts of Reshape(RMSNormalization(Reshape(x))), and the axes that a Squeeze behind it removes."""

    x: ir.Value
    scale: ir.Value
    epsilon: float
    squeezed: ir.Value | None


class NormsInAttentionPass(GraphPass):
    """Move the norms of q and k into the attention that reads them.

    Args:
        scales: caches that will have 8 bits; GroupQueryAttention keeps the norms outside of them, because
            CUDA's fused kernel for such a cache takes no norms.
    """

    def __init__(self, scales: CacheScales | None = None) -> None:
        super().__init__()
        self._scales = scales or CacheScales()

    def rewrite(self, graph: ir.Graph) -> None:
        """Rewrite every attention with supported norms of q and k."""
        found = [node for kind in _WEIGHTS for node in nodes_of(graph, kind, MICROSOFT)]
        for node in found:
            if node.op_type == "GroupQueryAttention" and node.inputs[3] in self._scales.by_cache:
                self.refuse(node, "its cache has 8 bits")
                continue
            size = static_size(node.inputs[3], 3)
            norms = [_head_norm(value, size) for value in node.inputs[:2]]
            reasons = [norm for norm in norms if isinstance(norm, str)]
            fitting = [norm for norm in norms if isinstance(norm, _HeadNorm)]
            if reasons:
                self.refuse(node, reasons[0])
            elif len(fitting) == 2 and fitting[0].epsilon != fitting[1].epsilon:
                self.refuse(node, "the norms of q and k have different epsilons")
            elif len(fitting) == 2:
                _absorb(graph, node, fitting)
                self.fired += 1


def _head_norm(value: ir.Value | None, size: int | None) -> _HeadNorm | str | None:
    """Return the norm that computes ``value``, why it is not supported, or None if there is none."""
    last = value.producer() if value is not None else None
    squeezed = None
    if last is not None and last.op_type == "Squeeze" and last.inputs[0] is not None:
        squeezed, last = last.inputs[1], last.inputs[0].producer()
    middle = last.inputs[0] if last is not None and last.op_type == "Reshape" else None
    norm = middle.producer() if middle is not None else None
    if norm is None or norm.op_type != "RMSNormalization" or norm.inputs[0] is None:
        return None
    first, scale = norm.inputs[0].producer(), norm.inputs[1]
    tensor = weight(scale)
    if first is None or first.op_type != "Reshape" or first.inputs[0] is None or scale is None:
        return "the input of the norm is not reshaped to heads"
    if tensor is None or list(tensor.shape) != [size] or static_size(norm.inputs[0], 3) != size:
        return "the norm is not over single heads"
    if int_attribute(norm, "axis", -1) not in (-1, 3) or any(
        len(node.outputs[0].uses()) > 1 for node in (first, norm, last) if node is not None
    ):
        return "the norm has other consumers, or normalises more than one axis"
    return _HeadNorm(first.inputs[0], scale, float_attribute(norm, "epsilon", 1e-5), squeezed)


def _absorb(graph: ir.Graph, node: ir.Node, norms: list[_HeadNorm]) -> None:
    places = _WEIGHTS[node.op_type]
    if len(node.inputs) <= places[-1]:
        node.resize_inputs(places[-1] + 1)
    for position, (place, norm) in enumerate(zip(places, norms, strict=True)):
        old, x = node.inputs[position], norm.x
        if norm.squeezed is not None:
            x = insert(node, "Squeeze", [x, norm.squeezed]).outputs[0]
        node.replace_input_with(position, x)
        node.replace_input_with(place, norm.scale)
        remove_unused(graph, old.producer() if old is not None else None)
    node.attributes.add(ir.AttrFloat32("qk_norm_epsilon", norms[0].epsilon))
