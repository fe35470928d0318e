"""Count and describe the operators, weights, inputs and outputs of a graph."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from ...contract import EXPERT_STACKS, EXPERTS_DOMAIN, POSITION_IDS
from .edit import MICROSOFT, int_attribute, nodes_of, weight
from .half_scales import Widened
from .lazy import stored_blocks

_GQA_TABLES = (7, 8)  # the inputs cos_cache and sin_cache
_INTEGER_PRODUCTS = {  # the attribute with the bits of the weights, and its default
    ("MatMulInteger", ""): ("", 8),
    ("MatMulNBits", MICROSOFT): ("bits", 4),
    ("GatherBlockQuantized", MICROSOFT): ("bits", 4),
    ("QMoE", MICROSOFT): ("expert_weight_bits", 4),
}
_WITH_GRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})  # the standard operators that have subgraphs
_NUMBER = re.compile(r"(?<=[A-Za-z_./])\d+")


def layer_pattern(text: str) -> str:
    """Return ``text`` with its numbers replaced by ``N``, so that names of all layers become equal."""
    return _NUMBER.sub("N", text)


def count_operators(model: ir.Model) -> dict[str, int]:
    """Count nodes by operator, including subgraphs; names of other domains are ``domain::Op``."""
    names = (
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in _nodes(model.graph)
    )
    return dict(sorted(Counter(names).items()))


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph and of its subgraphs.

    onnx_ir's traversal looks at each attribute of each node, a tenth of the time of lowering a mixture.
    """
    for node in graph:
        yield node
        if node.domain or node.op_type in _WITH_GRAPHS:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield from _nodes(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for inner in attribute.as_graphs():
                        yield from _nodes(inner)


def operators(model: ir.Model) -> dict[str, int]:
    """Return the count of each operator, most frequent first."""
    return dict(Counter(count_operators(model)).most_common())


def initializers(model: ir.Model) -> list[ir.TensorProtocol]:
    """Return the initializers, including those of subgraphs, largest first."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return sorted((t for t in tensors if t is not None), key=lambda t: (-t.nbytes, t.name or ""))


def stored(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the tensor as a file has it: scales that are float32 in memory may have 16 bits."""
    return tensor.half if isinstance(tensor, Widened) else tensor


def weights_by_type(model: ir.Model) -> dict[str, dict[str, int]]:
    """Return the number of tensors and bytes of each element type, largest first."""
    weights: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in map(stored, initializers(model)):
        entry = weights[tensor.dtype.name]
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return dict(sorted(weights.items(), key=lambda item: -item[1]["bytes"]))


_SIZES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.STRING})


def parameter_count(model: ir.Model) -> int | None:
    """Return the number of parameters; None if a kernel packed them.

    Scales, zero points and minima of blocks are not counted: they stand for parameters that are.
    """
    if any(node.domain and "bits" in node.attributes for node in model.graph):
        return None
    dequantizers = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    helpers = {value.name for node in dequantizers for value in node.inputs[1:] if value is not None}
    apart = (
        use.node for node in dequantizers for use in node.outputs[0].uses() if use.node.op_type == "Reshape"
    )
    added = (use.node for node in apart for use in node.outputs[0].uses() if use.node.op_type == "Add")
    helpers |= {value.name for node in added for value in node.inputs if value is not None}
    learned = (t for t in initializers(model) if t.dtype not in _SIZES and t.name not in helpers)
    return sum(t.size for t in learned if t.size > 1)


def _readers(node: ir.Node, op_type: str) -> list[ir.Node]:
    return [use.node for use in node.outputs[0].uses() if use.node.op_type == op_type]


# Operators that read a few rows of their weights.
LOOKUPS = frozenset({"Gather", "GatherBlockQuantized", "GroupQueryAttention", "RotaryEmbedding"})


def bytes_per_step(model: ir.Model) -> int:
    """Return the bytes of weights that a decoding step reads; lookups of single rows are not counted."""
    values = model.graph.initializers.values()
    read = (v for v in values if any(use.node.op_type not in LOOKUPS for use in v.uses()))
    return sum(value.const_value.nbytes for value in read if value.const_value is not None)


def position_limit(graph: ir.Graph) -> int | None:
    """Return the number of rows of the shortest table of positions; None if there is no such table.

    A table is a weight that ``RotaryEmbedding`` or ``GroupQueryAttention`` reads as cos or sin, or from which
    ``Gather`` takes the rows ``position_ids``.
    """
    tables = [
        value.shape[0]
        for value in graph.initializers.values()
        if value.shape is not None and len(value.shape) == 2 and any(map(_by_position, value.uses()))
    ]
    return min((rows for rows in tables if isinstance(rows, int)), default=None)


def _by_position(use: tuple[ir.Node, int]) -> bool:
    node, index = use
    if node.op_type == "Gather":
        positions = node.inputs[1]
        return index == 0 and getattr(positions, "name", None) == POSITION_IDS
    if node.op_type == "GroupQueryAttention":
        return index in _GQA_TABLES
    return node.op_type == "RotaryEmbedding" and index > 0


def describe_value(value: ir.Value) -> dict[str, Any]:
    """Return name, element type and shape of an input or output; a dynamic axis is a string."""
    shape = None if value.shape is None else [d if isinstance(d, int) else str(d) for d in value.shape]
    return {"name": value.name, "dtype": value.dtype.name if value.dtype else None, "shape": shape}


def describe_tensor(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """Return name, element type, shape and bytes of a weight."""
    shape = [int(size) for size in tensor.shape.numpy()]
    kept = stored(tensor)
    return {"name": tensor.name, "dtype": kept.dtype.name, "shape": shape, "bytes": kept.nbytes}


def quantized_bits(graph: ir.Graph) -> frozenset[int]:
    """Return the numbers of bits of the quantized weights of the graph; empty if there are none."""
    tensors = (weight(node.inputs[0]) for node in nodes_of(graph, "DequantizeLinear"))
    bits = {tensor.dtype.bitwidth for tensor in tensors if tensor is not None}
    floats = (value.const_value for value in graph.initializers.values() if value.dtype == ir.DataType.FLOAT)
    bits |= {
        blocks.bits for each in floats if each is not None and (blocks := stored_blocks(each)) is not None
    }
    for product, (name, default) in _INTEGER_PRODUCTS.items():
        for node in nodes_of(graph, *product):
            bits.add(int_attribute(node, name, default))
    for node in nodes_of(graph, EXPERT_STACKS, EXPERTS_DOMAIN):
        bits.update(node.attributes["stored_bits"].as_ints())
    return frozenset(bits)


def has_quantized_weights(graph: ir.Graph) -> bool:
    """Return whether a weight of the graph is quantized."""
    return bool(quantized_bits(graph))
