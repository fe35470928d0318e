"""Small helpers for passes that edit an ``ir.Graph`` in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

MICROSOFT = "com.microsoft"
OWN = "carryall"  # the domain of carryall's own kernels
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})  # the standard operators with subgraphs


def nodes_of(graph: ir.Graph, op_type: str, domain: str = "") -> Iterator[ir.Node]:
    """Yield the graph's nodes of one operator; the graph may change during the iteration."""
    yield from [node for node in graph if node.op_type == op_type and node.domain == domain]


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs among a node's attributes."""
    if not node.domain and node.op_type not in _CONTROL_FLOW:
        return
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def all_nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Yield the nodes of a graph and of its subgraphs, an inner one behind the node that holds it."""
    for node in graph:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that no caller can override, else None."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the content of an initializer or ``Constant`` output, else None. For small values only."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def hold_in_memory(graph: ir.Graph) -> None:
    """Load every initializer of a small graph: ONNX's reference evaluator does not read external data."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | npt.NDArray[Any]) -> ir.Value:
    """Register a tensor under ``name``, with a number appended if the name is taken."""
    content = ir.Tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    unique, number = name, 0
    while unique in graph.initializers:
        number += 1
        unique = f"{name}_{number}"
    content.name = unique
    value = ir.Value(
        name=unique,
        type=ir.TensorType(content.dtype),
        shape=ir.Shape(content.shape.numpy()),
        const_value=content,
    )
    graph.register_initializer(value)
    return value


def shared_constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Return the initializer ``name`` with this content, registered on first use.

    If an initializer of other content has the name, a number is appended.
    """
    unique, number = name, 0
    while unique in graph.initializers:
        if _holds(graph.initializers[unique], array):
            return graph.initializers[unique]
        number += 1
        unique = f"{name}_{number}"
    return add_initializer(graph, unique, array)


def _holds(value: ir.Value, array: npt.NDArray[Any]) -> bool:
    tensor = weight(value)
    if tensor is None or tuple(tensor.shape.numpy()) != array.shape:
        return False
    return tensor.dtype == ir.DataType.from_numpy(array.dtype) and tensor.tobytes() == array.tobytes()


def certainly_equal(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Return whether two shapes are known to be equal; unnamed dynamic axes count as different."""
    if a is None or b is None or a != b:
        return False
    return all(isinstance(dim, int) or dim.value is not None for dim in a)


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    num_outputs: int = 1,
) -> ir.Node:
    """Insert a new node in front of ``before`` and return it."""
    graph = before.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {before.name} does not belong to a graph")
    node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=num_outputs)
    graph.insert_before(before, node)
    if domain:
        graph.opset_imports.setdefault(domain, 1)
    return node


def replace(old: ir.Value, new: ir.Value) -> None:
    """Make every consumer of ``old`` read ``new``, which inherits type and shape of ``old`` where unknown.

    A graph output keeps its name, type and shape. ``new`` takes them over if it is computed in the same graph
    and is no output itself; else an Identity of it does. So no input, initializer, other output or value of
    an outer graph is renamed.
    """
    inherit(new, old)
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    graph = _graph_of_output(old)
    result = new if can_return(graph, new) else _identity(graph, old, new)
    result.type, result.shape = old.type, old.shape
    return_instead(old, result, f"{old.name}_replaced")
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, new)


def return_instead(old: ir.Value, result: ir.Value, name: str) -> None:
    """Make ``result`` the graph output in the place of ``old``, under its name; ``old`` is called ``name``.

    Args:
        old: an output of its graph.
        result: a value that a node of the same graph computes, and that is no output.
        name: the new name of ``old``.
    """
    graph = _graph_of_output(old)
    old.name, result.name = name, old.name
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = result


def _graph_of_output(value: ir.Value) -> ir.Graph:
    graph = value.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"{value.name} is an output of no graph that can be edited")
    return graph


def _identity(graph: ir.Graph, old: ir.Value, new: ir.Value) -> ir.Value:
    """Insert an Identity of ``new`` where ``new`` is known, and return its result."""
    node, maker, before = ir.node("Identity", [new]), new.producer(), old.producer()
    if maker is not None and maker.graph is graph:
        graph.insert_after(maker, node)
    elif before is not None:
        graph.insert_before(before, node)
    else:
        graph.insert_before(graph[0], node)
    return node.outputs[0]


def replace_but_shapes(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Replace a cache for all consumers but Shape nodes, because an attention's mask may depend on those."""
    producer = old.producer()
    new.type, new.shape = old.type, old.shape
    shapes = [use for use in old.uses() if use.node.op_type == "Shape" and not use.node.domain]
    replace(old, new)
    for node, index in shapes:
        node.replace_input_with(index, old)
    remove_unused(graph, producer)


def inherit(new: ir.Value, old: ir.Value) -> None:
    """Copy type and shape of ``old`` to ``new`` where they are None. () is a shape, that of a scalar."""
    new.type = old.type if new.type is None else new.type
    new.shape = old.shape if new.shape is None else new.shape


def take_name(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Set the name of ``value``; another value of the graph with that name is renamed."""
    if value.name == name:
        return
    others = (other for node in all_nodes(graph) for other in node.outputs if other.name == name)
    for other in [*graph.initializers.values(), *others]:
        if other.name == name:
            unique = f"{name}_inner"
            while unique in graph.initializers:
                unique += "_"
            other.name = unique
    value.name = name


def can_return(graph: ir.Graph, value: ir.Value) -> bool:
    """Return whether ``value`` can become an output of ``graph`` and take the output's name."""
    producer = value.producer()
    return producer is not None and producer.graph is graph and not value.is_graph_output()


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """Return the node that reads ``value`` if it is read once and is not a graph output, else None."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def remove_unused(graph: ir.Graph, node: ir.Node | None) -> None:
    """Remove ``node`` if none of its outputs is read, then its producers likewise."""
    stack, unused = [node], dict[ir.Node, None]()
    while stack:
        current = stack.pop()
        if current is None or current.graph is not graph or current in unused:
            continue
        outputs = current.outputs
        if any(use.node not in unused for output in outputs for use in output.uses()):
            continue
        if any(output.is_graph_output() for output in outputs):
            continue
        unused[current] = None
        stack.extend(value.producer() for value in current.inputs if value is not None)
    if unused:  # together: each call looks at all outputs of the graph
        graph.remove(unused, safe=True)


def static_size(value: ir.Value | None, axis: int) -> int | None:
    """Return the size of an axis, None if it is unknown or dynamic."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """Return a float attribute or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def text_attribute(node: ir.Node, name: str, default: str) -> str:
    """Return a text attribute or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()
