"""Check a node against ONNX's operator schemas: whether it is valid, and whether an older opset has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from .edit import int_attribute

_FLOAT_MOD = 28  # the opset that defines Mod of floats without fmod
# Operators whose results changed while their schema did not, and the opset of the change.
_CHANGED_RESULTS = {"DFT": 20, "GridSample": 20, "GroupNormalization": 21}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def invalid(node: ir.Node, version: int) -> str | None:
    """Return why a node violates its schema; None if it is valid or has no schema.

    These are the checks of ONNX's checker, without copying tensor attributes.
    """
    schema = _schema(node, version)
    if schema is None:
        return None
    if schema.deprecated:
        return f"opset {version} no longer has it"
    for name, attribute in node.attributes.items():
        stated = schema.attributes.get(name)
        if stated is None:
            return f"it has no attribute {name}"
        wanted = str(stated.type).rpartition(".")[2]
        if attribute.type.name != wanted:
            return f"its attribute {name} has type {attribute.type.name} instead of {wanted}"
    for name, stated in schema.attributes.items():
        if stated.required and name not in node.attributes:
            return f"its required attribute {name} is missing"
    sides = (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    )
    for side, values, least, most in sides:
        if not least <= len(values) <= most:
            return f"it has {len(values)} {side} instead of {least} to {most}"
    return None


def least_inputs(node: ir.Node, version: int) -> int:
    """Return the least number of inputs of a node, with empty ones; 0 if it has no schema."""
    schema = _schema(node, version)
    return 0 if schema is None else int(schema.min_input)


def _schema(node: ir.Node, version: int) -> onnx.defs.OpSchema | None:
    if not onnx.defs.has(node.op_type, version, node.domain):
        return None
    return onnx.defs.get_schema(node.op_type, version, node.domain)


def missing_form(node: ir.Node, version: int) -> str | None:
    """Return why a standard node cannot be expressed in opset ``version``, None if it can.

    The reason is the predicate of a sentence about the opset. Unknown types are assumed to be allowed.
    Between opsets 18 and 28 four operators changed their results but not their schema: Mod and
    ``_CHANGED_RESULTS``.
    """
    if node.domain:
        return None
    schema = _schema(node, version)
    if schema is None:
        return "does not have this operator"
    if version < _CHANGED_RESULTS.get(node.op_type, 0):
        return "defines other results"
    extra = sorted(set(node.attributes) - set(schema.attributes))
    if extra:
        return f"does not have the attribute {extra[0]}"
    if len(node.inputs) > schema.max_input or len(node.outputs) > schema.max_output:
        return "allows fewer inputs or outputs"
    floats = any(value is not None and value.dtype in _FLOATS for value in node.inputs)
    if node.op_type == "Mod" and version < _FLOAT_MOD and floats and not int_attribute(node, "fmod", 0):
        return "requires the attribute fmod for Mod of floats"
    sides: tuple[tuple[Sequence[ir.Value | None], Sequence[onnx.defs.OpSchema.FormalParameter]], ...]
    sides = ((node.inputs, schema.inputs), (node.outputs, schema.outputs))
    wrong = (kind for values, formal in sides for kind in _unknown_types(values, formal))
    kind = next(wrong, None)
    return None if kind is None else f"does not allow {kind}"


def _unknown_types(
    values: Sequence[ir.Value | None], formal: Sequence[onnx.defs.OpSchema.FormalParameter]
) -> Iterator[str]:
    for index, value in enumerate(values):
        if value is None or not isinstance(value.type, ir.TensorType) or not value.type.dtype.name:
            continue
        kind = f"tensor({value.type.dtype.name.lower()})"
        if value.type.dtype and kind not in formal[min(index, len(formal) - 1)].types:  # the last is variadic
            yield kind
