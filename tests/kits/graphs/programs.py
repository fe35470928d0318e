"""What a graph computes, node by node, without the names of its values: to tell whether two are the same."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import onnx_ir as ir

_UNKNOWN = re.compile(r"unk__\d+")  # the names that shape inference gives to sizes that it does not know


def program(model: ir.Model) -> list[Any]:
    """Return inputs, nodes and outputs; a value is its number, an initializer its type, shape and content."""
    numbers: dict[ir.Value | None, Any] = {None: None}

    def known(value: ir.Value | None) -> Any:
        if value not in numbers:
            tensor = None if value is None else value.const_value
            numbers[value] = len(numbers) if tensor is None else _content(tensor)
        return numbers[value]

    def typed(value: ir.Value) -> tuple[Any, ...]:
        return known(value), str(value.dtype), _UNKNOWN.sub("None", str(value.shape))

    lines: list[Any] = [[(value.name, *typed(value)) for value in model.graph.inputs]]
    for node in model.graph:
        attributes = sorted((name, _stored(attribute)) for name, attribute in node.attributes.items())
        operands = [known(value) for value in node.inputs]
        lines.append((node.domain, node.op_type, attributes, operands, [typed(one) for one in node.outputs]))
    lines.append([(value.name, *typed(value)) for value in model.graph.outputs])
    return [*lines, sorted(model.metadata_props.items()), sorted(model.opset_imports.items())]


def _stored(attribute: ir.Attr) -> str:
    """Return the value of an attribute as a file holds it: floats in 32 bits."""
    return str(ir.to_proto(attribute)).partition("\n")[2]


def _content(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tensor.dtype.name, str(tensor.shape), hashlib.sha256(tensor.tobytes()).hexdigest()
