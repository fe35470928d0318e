"""Seeded mutations of graphs; each is one small fault of the kind that a wrong rewrite makes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

_OTHER_OPERATORS = {
    "Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul", "Sigmoid": "Tanh", "Tanh": "Sigmoid",
    "Erf": "Tanh", "Relu": "Abs", "Softmax": "LogSoftmax", "MaxPool": "AveragePool", "Gelu": "Relu",
    "RMSNormalization": "LpNormalization",
}  # fmt: skip
_NUMBERS = (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.INTS, ir.AttributeType.FLOATS)
_HARMLESS = {"to", "kernel_shape", "training_mode"}


def mutate(model: ir.Model, seed: int) -> str | None:
    """Apply one mutation in place and return its description, or None if the chosen kind does not apply."""
    rng = np.random.default_rng(seed)
    kind = _KINDS[int(rng.integers(len(_KINDS)))]
    return kind(model, rng)


def _constant(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Change one or all elements of a weight: value, sign, roll or scale; integers change by one."""
    values = [value for value in model.graph.initializers.values() if value.const_value is not None]
    if not values:
        return None
    value = values[int(rng.integers(len(values)))]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    if not array.size or array.dtype.kind not in "fiu":
        return None
    flat = array.reshape(-1)
    place, how = int(rng.integers(flat.size)), int(rng.integers(6))
    if array.dtype.kind in "iu":
        flat[place] += rng.choice([-1, 1])
        what = f"[{place}] by one"
    elif how == 0:
        flat[place] += 3 * max(float(array.std()), 0.1)
        what = f"[{place}] moved"
    elif how == 1:
        flat[place] = -flat[place]
        what = f"[{place}] negated"
    elif how == 2:
        array = -array
        what = "negated"
    elif how == 3:
        array = array * array.dtype.type(rng.choice([0.5, 0.9, 0.99, 1.01, 1.1, 2.0]))
        what = "scaled"
    elif how == 4:
        array = np.roll(array, 1, axis=int(rng.integers(array.ndim))) if array.ndim else array + 1
        what = "rolled"
    else:
        array = np.full_like(array, array.mean())
        what = "made constant"
    value.const_value = ir.tensor(
        np.ascontiguousarray(array).reshape(value.const_value.shape.numpy()), name=value.name
    )
    return f"{value.name} {what}"


def _attribute(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Change an attribute: an integer by one, scale a float, or change or swap elements of a list."""
    found = [
        (node, attribute)
        for node in model.graph
        for attribute in node.attributes.values()
        if attribute.name not in _HARMLESS and attribute.type in _NUMBERS
    ]
    if not found:
        return None
    node, attribute = found[int(rng.integers(len(found)))]
    content = attribute.value
    if attribute.type == ir.AttributeType.INT:
        new: object = int(content) + int(rng.choice([-1, 1]))
    elif attribute.type == ir.AttributeType.FLOAT:
        new = float(content) * float(rng.choice([-1, 0.1, 0.9, 1.1, 10, 1000]))
    elif attribute.type == ir.AttributeType.FLOATS:
        floats = [float(number) for number in content]
        place = int(rng.integers(len(floats)))
        floats[place] += float(rng.choice([-1, 1])) * (abs(floats[place]) or 0.5)
        new = floats
    else:
        numbers = [int(number) for number in content]
        place = int(rng.integers(len(numbers)))
        if rng.random() < 0.5 and len(numbers) > 1:
            numbers[place], numbers[place - 1] = numbers[place - 1], numbers[place]
        else:
            numbers[place] += 1
        new = numbers
    node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, new)
    return f"{node.op_type} {attribute.name} {content} -> {new}"[:200]


def _swap(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Swap two inputs of a node."""
    nodes = [node for node in model.graph if sum(value is not None for value in node.inputs) > 1]
    if not nodes:
        return None
    node = nodes[int(rng.integers(len(nodes)))]
    places = [number for number, value in enumerate(node.inputs) if value is not None]
    a, b = rng.choice(places, 2, replace=False).tolist()
    first, second = node.inputs[a], node.inputs[b]
    if first is second:
        return None
    node.replace_input_with(a, second)
    node.replace_input_with(b, first)
    return f"{node.op_type} {node.outputs[0].name}: inputs {a} and {b} swapped"


def _drop(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Remove a node; one of its inputs replaces its output."""
    nodes = [
        node
        for node in model.graph
        if node.inputs and not any(value.is_graph_output() for value in node.outputs)
    ]
    if not nodes:
        return None
    node = nodes[int(rng.integers(len(nodes)))]
    given = [value for value in node.inputs if value is not None]
    other = given[int(rng.integers(len(given)))]
    node.outputs[0].replace_all_uses_with(other)
    return f"{node.op_type} {node.outputs[0].name} dropped for {other.name}"


def _operator(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Replace a node's operator with another one."""
    nodes = [node for node in model.graph if node.op_type in _OTHER_OPERATORS and not node.domain]
    if not nodes:
        return None
    node = nodes[int(rng.integers(len(nodes)))]
    old, node.op_type = node.op_type, _OTHER_OPERATORS[node.op_type]
    return f"{old} {node.outputs[0].name} -> {node.op_type}"


def _rewire(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Connect an input of a node to another value that is computed before it."""
    nodes = list(model.graph)
    if len(nodes) < 2:
        return None
    number = int(rng.integers(1, len(nodes)))
    node = nodes[number]
    earlier = [value for other in nodes[:number] for value in other.outputs]
    places = [
        place for place, value in enumerate(node.inputs) if value is not None and value.producer() is not None
    ]
    if not places:
        return None
    place = places[int(rng.integers(len(places)))]
    old = node.inputs[place]
    assert old is not None
    alike = [
        value
        for value in earlier
        if value is not old and value.shape == old.shape and value.dtype == old.dtype
    ]
    if not alike:
        return None
    new = alike[int(rng.integers(len(alike)))]
    node.replace_input_with(place, new)
    return f"{node.op_type} {node.outputs[0].name} reads {new.name} instead of {old.name}"


def _rename(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Rename an input or output of the graph."""
    values = [*model.graph.inputs, *model.graph.outputs]
    value = values[int(rng.integers(len(values)))]
    old, value.name = value.name, f"{value.name}_renamed"
    return f"{old} renamed"


def _swap_outputs(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Swap two outputs of the graph, or their names."""
    outputs = model.graph.outputs
    if len(outputs) < 2:
        return None
    a, b = (outputs[place] for place in rng.choice(len(outputs), 2, replace=False).tolist())
    if rng.random() < 0.5:
        a.name, b.name = b.name, a.name
        return f"{a.name} and {b.name} have each other's name"
    order = [b if value is a else a if value is b else value for value in outputs]
    outputs.clear()
    outputs.extend(order)
    return f"{a.name} and {b.name} swapped"


def _drop_operands(model: ir.Model, rng: np.random.Generator) -> str | None:
    """Drop the last inputs of a node, as a trimmed list of optional ones does."""
    nodes = [node for node in model.graph if len(node.inputs) > 1]
    if not nodes:
        return None
    node = nodes[int(rng.integers(len(nodes)))]
    count = int(rng.integers(1, len(node.inputs)))
    node.resize_inputs(count)
    return f"{node.op_type} {node.outputs[0].name} keeps {count} inputs"


_KINDS: tuple[Callable[[ir.Model, np.random.Generator], str | None], ...] = (
    _constant, _constant, _constant, _attribute, _attribute, _swap, _drop, _operator, _rewire,
    _rename, _swap_outputs, _drop_operands,
)  # fmt: skip
