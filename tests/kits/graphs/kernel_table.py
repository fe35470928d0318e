"""Find nodes of a lowered graph without kernel, by registered versions and types and by written rules.

A kernel fits as ``KernelRegistry`` of onnxruntime decides: the version of the node's schema is its first, or
lies in its range if that has an end, and every type parameter that it restricts has one of its types.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as state

from carryall.graph_opt.graph.edit import constant, subgraphs, weight
from carryall.providers.placement import _SHAPE_OPERATORS, LARGE

FOLDER = Path(__file__).parents[3] / "providers" / "ort" / "registrations"
_LONG = {"f": "float", "h": "float16", "b": "bfloat16", "d": "double", "?": "bool", "s": "string"}
# Outputs whose type follows from an attribute or an operand, not from a type parameter of an input.
_SCALE, _ZERO_POINT = 1, 2

Rule = Callable[[ir.Node], str | None]
Types = dict[str, str]


class KernelTable:
    """The kernels of one provider.

    Args:
        name: the name of the table.
        rules: by operator, why a kernel of it refuses a node although its types fit; None if it does not.
    """

    def __init__(self, name: str, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.rows: dict[str, list[tuple[int, int | None, dict[str, frozenset[str]]]]] = defaultdict(list)
        for line in (FOLDER / f"{name}.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                operator, versions, *types = line.split()
                first, _, last = versions.partition("-")
                parts = (entry.partition("=") for entry in types)
                known = {key: frozenset(map(_long, found.split(","))) for key, _, found in parts}
                self.rows[operator].append((int(first), int(last) if last else None, known))

    def misfit(self, node: ir.Node, opset: int, types: Mapping[ir.Value, str]) -> str | None:
        """Return why no kernel fits a node, None if one does."""
        operator = _operator(node)
        schema = schema_of(node, opset)
        if unknown := node.attributes.keys() - schema.attributes.keys():
            return f"{operator} has no attributes {sorted(unknown)}"
        if len(node.inputs) > len(schema.inputs) and not _is_variadic(schema):
            return f"{operator} has {len(schema.inputs)} inputs, not {len(node.inputs)}"
        bound = bind(node, schema, types)
        versions = [row for row in self.rows[operator] if _version_fits(row[0], row[1], schema.since_version)]
        if not versions:
            return f"{operator} has no kernel of version {schema.since_version}"
        if not any(
            all(bound.get(key, "") in ("", *kinds) for key, kinds in row[2].items()) for row in versions
        ):
            return f"{operator} has no kernel of {bound}"
        rule = self.rules.get(operator)
        reason = rule(node) if rule is not None else None
        return None if reason is None else f"{operator}: {reason}"


def misfits(model: ir.Model, table: KernelTable, host: KernelTable) -> list[str]:
    """Return the nodes of a lowered graph without kernel; shape arithmetic may run on the host instead."""
    opset, types = model.graph.opset_imports[""], value_types(model.graph, model.graph.opset_imports[""])
    found = []
    for node in model.graph.all_nodes():
        reason = table.misfit(node, opset, types)
        if reason is not None and (_is_heavy(node, types) or host.misfit(node, opset, types) is not None):
            found.append(f"{node.name or node.outputs[0].name}: {reason}")
    return found


def value_types(
    graph: ir.Graph, opset: int, outer: Mapping[ir.Value, str] | None = None
) -> dict[ir.Value, str]:
    """Return the element type of every value, from operands and schemas alone."""
    given = [*graph.inputs, *graph.initializers.values()]
    types = dict(outer or {})
    types |= {value: _name(value.dtype) for value in given if value.dtype is not None}
    for node in graph:
        schema = schema_of(node, opset)
        bound = bind(node, schema, types)
        branches = list(subgraphs(node))
        for branch in branches:
            types |= value_types(branch, opset, types)
        for index, value in enumerate(node.outputs):
            inner = types.get(branches[0].outputs[index]) if branches else None
            types[value] = inner or _output_type(node, index, schema, bound, types)
    return types


def _is_heavy(node: ir.Node, types: Mapping[ir.Value, str]) -> bool:
    """Whether onnxruntime would not place a node on the host as shape arithmetic (``placement.py``)."""
    floats = any("float" in types[value] for value in node.outputs if value in types)
    large = any(
        value is not None and (tensor := weight(value)) is not None and tensor.nbytes > LARGE
        for value in node.inputs
    )
    return floats or large or bool(node.domain) or node.op_type not in _SHAPE_OPERATORS


def bind(node: ir.Node, schema: Any, types: Mapping[ir.Value, str]) -> Types:
    """Return the types of the node's operands by type parameter and by operand name."""
    bound: Types = {}
    for values, parameters in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            parameter = parameters[min(index, len(parameters) - 1)]
            if value is not None and value in types:
                bound.setdefault(parameter.typeStr, types[value])
                bound.setdefault(parameter.name, types[value])
    return bound


def schema_of(node: ir.Node, opset: int) -> Any:
    """Return the schema of a node's operator in onnxruntime."""
    newest = opset if not node.domain else 1
    return max(
        (one for one in _schemas()[node.domain, node.op_type] if one.since_version <= newest),
        key=lambda one: one.since_version,
    )


def _is_variadic(schema: Any) -> bool:
    return bool(schema.inputs) and schema.inputs[-1].option == type(schema.inputs[-1].option).Variadic


def _output_type(node: ir.Node, index: int, schema: Any, bound: Types, types: Mapping[ir.Value, str]) -> str:
    if node.op_type == "Cast":
        return _name(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        operand = node.inputs[_ZERO_POINT if node.op_type == "QuantizeLinear" else _SCALE]
        return types[operand] if operand is not None else "uint8"
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return "float" if value is None else _name(value.as_tensor().dtype)
    parameter = schema.outputs[min(index, len(schema.outputs) - 1)].typeStr
    if parameter in bound:
        return bound[parameter]
    allowed = [one.allowed_type_strs for one in schema.type_constraints if one.type_param_str == parameter]
    only = allowed[0][0] if allowed and len(allowed[0]) == 1 else parameter
    return str(only).removeprefix("tensor(").removesuffix(")")


def _name(dtype: ir.DataType) -> str:
    return dtype.name.lower()


@functools.cache
def _schemas() -> dict[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for schema in state.get_all_operator_schema():
        found[schema.domain, schema.name].append(schema)
    return found


def _version_fits(first: int, last: int | None, since: int) -> bool:
    return first == since or (last is not None and first < since <= last)


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _long(short: str) -> str:
    if short in _LONG:
        return _LONG[short]
    sign, digits = short[:1], short[1:]
    return f"{'u' if sign == 'u' else ''}int{digits}" if sign in "iu" and digits.isdigit() else short


def attribute(node: ir.Node, name: str, default: Any = 0) -> Any:
    """Return an attribute's value."""
    return node.attributes[name].value if name in node.attributes else default


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is known when the graph is loaded."""
    return value is None or constant(value) is not None
