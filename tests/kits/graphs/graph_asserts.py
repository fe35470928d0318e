"""Compare graphs by structure, without names of inner values and the order of independent nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass


def graph(text: str, **initializers: Any) -> ir.Model:
    """Parse the ONNX text of a model's body; arrays that it names become initializers."""
    imports = '"" : 23, "com.microsoft" : 1'
    words = {*re.findall(r"\w+", text), *re.findall(r"[\w.]+", text)}
    used = {name: np.asarray(array) for name, array in initializers.items() if name in words}
    tensors = [ir.tensor(array, name=name) for name, array in used.items()]
    return ir.from_onnx_text(f"<ir_version: 11, opset_import: [{imports}]> {text}", initializers=tensors)


def canonical(model: ir.Model) -> list[str]:
    """Return one line per node, numbered in depth-first order from the outputs."""
    lines: list[str] = []
    names: dict[ir.Value, str] = {}

    def visit(value: ir.Value | None) -> str:
        if value is None:
            return "-"
        if value not in names:
            node = value.producer()
            if node is not None:
                _visit_node(node)
            elif value.const_value is not None:
                names[value] = _constant(value.const_value)
            else:
                names[value] = str(value.name)
        return names[value]

    def _visit_node(node: ir.Node) -> None:
        operands = [visit(operand) for operand in node.inputs]
        attributes = [f"{name}={_attribute(value)}" for name, value in sorted(node.attributes.items())]
        op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        number = len(lines)
        lines.append(f"%{number} = {op}({', '.join([*operands, *attributes])})")
        for index, output in enumerate(node.outputs):
            names[output] = f"%{number}.{index}"

    outputs = [f"{value.name} = {visit(value)}" for value in model.graph.outputs]
    inputs = "inputs: " + ", ".join(sorted(f"{value.name}{value.shape}" for value in model.graph.inputs))
    return [inputs, *lines, *outputs]


def assert_same(actual: ir.Model, expected: ir.Model) -> None:
    """Assert that two models have the same structure, constants and interface."""
    assert canonical(actual) == canonical(expected)


def apply(pass_: GraphPass, model: ir.Model) -> list[str]:
    """Run a pass in place, remove unused nodes, and return the reasons of its refusals."""
    pass_(model)
    RemoveUnusedNodesPass()(model)
    return [refusal.reason for refusal in pass_.refusals]


def evaluate(model: ir.Model, feed: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    """Run a model of standard operators in ONNX's reference evaluator."""
    return [np.asarray(value) for value in ReferenceEvaluator(ir.to_proto(model)).run(None, dict(feed))]


def _constant(tensor: ir.TensorProtocol) -> str:
    array = tensor.numpy()
    return f"{tensor.dtype.name}{list(array.shape)}{array.reshape(-1).astype(np.float64).round(6).tolist()}"


def _attribute(attribute: ir.Attr) -> str:
    value = attribute.value
    return f"{value:.6g}" if isinstance(value, float) else str(value)
