"""Hash nodes by structure, independent of names.

As in a Merkle tree, a node's hash includes the hashes of its producers (or, backward, of its consumers), so
equal hashes mean equal graphs up to that node. Large weights are hashed by type and shape only; the contents
of matched nodes' weights are compared later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

_LARGE = 64  # elements; smaller constants, such as axes, belong to the structure
_SAMPLES = 256

Seeds = Mapping[ir.Value, object]


def forward_hashes(graph: ir.Graph, seeds: Seeds) -> dict[ir.Node, int]:
    """Hash every node with everything upstream of it.

    Args:
        graph: a graph in topological order.
        seeds: an identity for each graph input.
    """
    return _forward(graph, {value: hash(seed) for value, seed in seeds.items()})


def backward_hashes(graph: ir.Graph, seeds: Seeds) -> dict[ir.Node, int]:
    """Hash every node with everything downstream of it.

    Args:
        graph: a graph in topological order.
        seeds: an identity for each graph output.
    """
    hashes: dict[ir.Node, int] = {}
    for node in reversed(graph):
        uses = [
            (index, use.idx, hashes.get(use.node, 0))
            for index, value in enumerate(node.outputs)
            for use in value.uses()
        ]
        outputs = [(index, seeds[value]) for index, value in enumerate(node.outputs) if value in seeds]
        hashes[node] = hash((local_hash(node), tuple(sorted(uses)), tuple(outputs)))
    return hashes


def local_hash(node: ir.Node) -> int:
    """Hash a node's operator, attributes, constants, and which operands are present."""
    constants = tuple(_constant_hash(value) for value in node.inputs)
    return hash((*_operator(node), _attributes(node, {}), constants, len(node.outputs)))


def weight_hash(node: ir.Node) -> int | None:
    """Hash a node's operator and samples of its large weights; None if it has none."""
    tensors = [tensor for tensor in map(constant_of, node.inputs) if tensor is not None]
    large = tuple(_sample(tensor) for tensor in tensors if tensor.size > _LARGE)
    return hash((*_operator(node), large)) if large else None


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that is not a graph input, or of a ``Constant``, else None."""
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)


def attribute_text(attribute: ir.Attr) -> str:
    """Return an attribute's value as text."""
    return f"{attribute.value:g}" if attribute.type == ir.AttributeType.FLOAT else str(attribute.value)[:200]


def attribute_hash(attribute: ir.Attr) -> int:
    """Hash an attribute's value; graphs by their structure."""
    return _attribute(attribute, {})


def _forward(graph: ir.Graph, known: dict[ir.Value, int]) -> dict[ir.Node, int]:
    hashes: dict[ir.Node, int] = {}
    for node in graph:
        operands = tuple(_operand(value, known) for value in node.inputs)
        result = hash((*_operator(node), _attributes(node, known), operands, len(node.outputs)))
        hashes[node] = result
        known.update({value: hash((result, index)) for index, value in enumerate(node.outputs)})
    return hashes


def _operator(node: ir.Node) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def _operand(value: ir.Value | None, known: Mapping[ir.Value, int]) -> int:
    if value is None:
        return 0
    constant = _constant_hash(value)
    return constant if constant is not None else known.get(value, 1)


def _constant_hash(value: ir.Value | None) -> int | None:
    tensor = constant_of(value)
    if tensor is None:
        return None
    form = (tensor.dtype.name, tuple(tensor.shape.numpy()))
    return hash(form) if tensor.size > _LARGE else hash((*form, tensor.tobytes()))


def _sample(tensor: ir.TensorProtocol) -> int:
    """Hash some elements of a tensor, evenly spaced."""
    content = np.asarray(tensor.numpy()).reshape(-1)
    part = np.ascontiguousarray(content[:: max(1, content.size // _SAMPLES)])
    return hash((tensor.dtype.name, tuple(tensor.shape.numpy()), part.tobytes()))


def _attributes(node: ir.Node, known: Mapping[ir.Value, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, _attribute(value, known)) for name, value in sorted(node.attributes.items()))


def _attribute(attribute: ir.Attr, known: Mapping[ir.Value, int]) -> int:
    if attribute.is_ref():
        return hash(("reference", attribute.ref_attr_name))
    if attribute.type == ir.AttributeType.GRAPH:
        return _subgraph(attribute.as_graph(), known)
    if attribute.type == ir.AttributeType.GRAPHS:
        return hash(tuple(_subgraph(graph, known) for graph in attribute.as_graphs()))
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor(attribute.as_tensor())
    if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        return hash(np.asarray(attribute.value, np.float32).tobytes())  # as a file stores it
    return hash((attribute.type.name, tuple(_plain(attribute.value))))


def _subgraph(graph: ir.Graph, known: Mapping[ir.Value, int]) -> int:
    inner = dict(known) | {value: hash(("input", index)) for index, value in enumerate(graph.inputs)}
    nodes = tuple(sorted(_forward(graph, inner).values()))
    return hash((len(graph.inputs), nodes, tuple(_operand(value, inner) for value in graph.outputs)))


def _tensor(tensor: ir.TensorProtocol) -> int:
    return hash((tensor.dtype.name, tuple(tensor.shape.numpy()), tensor.tobytes()))


def _plain(value: Any) -> Iterator[Any]:
    """Yield an attribute's value or values in hashable form."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        yield _tensor(one) if isinstance(one, ir.TensorProtocol) else one if _is_plain(one) else str(one)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes))
