"""The norms of q and k, each on a part of one product -> one norm on both, with a scale for each head.

onnxruntime's kernels take a scale of any shape that broadcasts; the standard operator takes a vector only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..edit import (
    MICROSOFT,
    add_initializer,
    float_attribute,
    insert,
    int_attribute,
    nodes_of,
    remove_unused,
    replace,
    shared_constant,
    sole_consumer,
    weight,
)
from ..lazy import lazy, shape_of
from ..passes.base import GraphPass


@dataclass(frozen=True, slots=True)
class _Branch:
    """Split part -> Reshape -> norm -> Reshape -> attention."""

    split: ir.Node
    norm: ir.Node
    output: ir.Value
    heads: int

    @property
    def scale(self) -> ir.TensorProtocol:
        """The vector that scales every head."""
        tensor = weight(self.norm.inputs[1])
        if tensor is None:
            raise AssertionError("unreachable: the scale was checked")
        return tensor


class JointNormsPass(GraphPass):
    """Join the q and k norms of every attention on parts of one product."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Join the two norms above every GroupQueryAttention."""
        for node in nodes_of(graph, "GroupQueryAttention", MICROSOFT):
            heads = (int_attribute(node, "num_heads", 0), int_attribute(node, "kv_num_heads", 0))
            query, key = (_branch(value, n) for value, n in zip(node.inputs[:2], heads, strict=True))
            if query is None or key is None:
                continue
            reason = _misfit(node, query, key)
            if reason is not None:
                self.refuse(node, reason)
                continue
            _join(graph, query, key)
            self.fired += 1


def _branch(value: ir.Value | None, heads: int) -> _Branch | None:
    """Follow an operand of an attention up to the Split of its product."""
    chain: list[ir.Node] = []
    current = value
    for op_type in ("Reshape", "RMSNormalization", "Reshape", "Split"):
        node = current.producer() if current is not None else None
        if node is None or node.op_type != op_type or node.domain:
            return None
        if op_type != "Split" and sole_consumer(node.outputs[0]) is None:
            return None
        chain.append(node)
        current = node.inputs[0]
    return _Branch(chain[3], chain[1], chain[0].outputs[0], heads)


def _misfit(node: ir.Node, query: _Branch, key: _Branch) -> str | None:
    parts = [branch.norm.inputs[0] for branch in (query, key)]
    sources = [part.producer() for part in parts if part is not None]
    read = [source.inputs[0] for source in sources if source is not None]
    if query.split is not key.split or [*read, node.inputs[2]] != list(query.split.outputs):
        return "q, k and v are not the parts of one product, in this order"
    scales = [weight(branch.norm.inputs[1]) for branch in (query, key)]
    if any(scale is None or len(shape_of(scale)) != 1 for scale in scales):
        return "a scale of its norms is no vector"
    if len({float_attribute(branch.norm, "epsilon", 1e-5) for branch in (query, key)}) > 1:
        return "its norms differ in epsilon"
    return None


def _join(graph: ir.Graph, query: _Branch, key: _Branch) -> None:
    before, heads, size = query.split, query.heads + key.heads, shape_of(query.scale)[0]
    widths = [query.heads * size, key.heads * size]
    value = query.split.outputs[2]
    rest = _width(value)
    sizes = shared_constant(graph, f"joint.{sum(widths)}_{rest}", np.array([sum(widths), rest], np.int64))
    both, new_value = insert(before, "Split", [before.inputs[0], sizes], {"axis": -1}, num_outputs=2).outputs
    shape = shared_constant(graph, f"joint.heads_{heads}_{size}", np.array([0, 0, heads, size], np.int64))
    apart = insert(before, "Reshape", [both, shape]).outputs[0]
    attributes = {"axis": -1, "epsilon": float_attribute(query.norm, "epsilon", 1e-5)}
    normed = insert(before, "RMSNormalization", [apart, _scale(graph, query, key)], attributes)
    normed.name = query.norm.name
    flat = shared_constant(graph, f"joint.flat_{heads * size}", np.array([0, 0, heads * size], np.int64))
    joined = insert(before, "Reshape", [normed.outputs[0], flat]).outputs[0]
    parts = shared_constant(graph, f"joint.{widths[0]}_{widths[1]}", np.array(widths, np.int64))
    made = insert(before, "Split", [joined, parts], {"axis": -1}, num_outputs=2).outputs
    replace(value, new_value)
    for branch, output in zip((query, key), made, strict=True):
        replace(branch.output, output)
        remove_unused(graph, branch.output.producer())


def _width(value: ir.Value) -> int:
    size = value.shape[-1] if value.shape is not None else None
    if not isinstance(size, int):
        raise AssertionError("unreachable: the merged product's parts have known sizes")
    return size


def _scale(graph: ir.Graph, query: _Branch, key: _Branch) -> ir.Value:
    """Register the scales [heads, head_dim] of q and k."""
    size = shape_of(query.scale)[0]
    scales = [(branch.scale, branch.heads) for branch in (query, key)]  # the nodes will be gone

    def compute() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.concatenate([np.tile(scale.numpy(), (heads, 1)) for scale, heads in scales])

    tensor = lazy(compute, query.scale.dtype, (query.heads + key.heads, size))
    return add_initializer(graph, f"{query.norm.inputs[1] and query.norm.inputs[1].name}+k", tensor)
