"""Products whose kernels round their activations to int8: without the rounding, and with it simulated.

Kernels such as onnxruntime's MatMulNBits with ``accuracy_level`` 4 round each block of an input to int8. On a
model with large activations a correct lowering may then differ from the float graph as much as a wrong one.
Without the rounding it must be equal. With it, it may differ about as much as with simulated rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...storage.scratch import scratch_folder
from ..graph.edit import add_initializer, insert, int_attribute
from ..graph.lazy import Array
from ..graph.load import load_model
from ..graph.saving import save_model
from .report import VerifyReport

_LEVEL = "accuracy_level"
_FLOAT32, _INT8 = 1, 4  # accuracy levels of com.microsoft MatMulNBits
_LARGEST = 127
_AXES_ARE_INPUTS = 18  # opset of ReduceMax
_TINY = 1e-30  # a smaller block is rounded as zeros


def rounded_products(model: ir.Model) -> list[ir.Node]:
    """Return the products whose kernels round float32 activations to int8."""
    return [
        node
        for node in model.graph.all_nodes()
        if node.op_type == "MatMulNBits"
        and int_attribute(node, _LEVEL, 0) == _INT8
        and node.inputs[2] is not None
        and node.inputs[2].dtype == ir.DataType.FLOAT
    ]


def judge_rounding(
    report: VerifyReport,
    files: tuple[Path, Path],
    compare: Callable[[Path, Path, ir.Model], VerifyReport],
) -> VerifyReport:
    """Add to a report what the candidate computes without rounding, and, if needed, what rounding alone does.

    Args:
        report: the comparison of both files.
        files: the reference and the candidate.
        compare: compares two files, the second of which holds the given graph.
    """
    with scratch_folder() as folder:
        exact, simulated = folder / "exact.onnx", folder / "simulated.onnx"
        report = replace(report, exact=compare(files[0], exact, _write_without_rounding(files[1], exact)))
        wrong = report.exact is None or not report.exact.passed
        if wrong or report.tokens is None or report.tokens.kl <= (report.bars.max_kl or 0.0):
            return report
        # Equal to the reference, and faster: lowered.
        rounding = compare(exact, simulated, _write_with_simulated_rounding(files[1], simulated))
        return replace(report, simulated=rounding.tokens)


def _write_without_rounding(model: Path, path: Path) -> ir.Model:
    """Write a copy whose products compute in float32, and return it."""
    copy = load_model(model)
    _compute_in_floats(rounded_products(copy))
    save_model(copy, path)
    return copy


def _write_with_simulated_rounding(model: Path, path: Path) -> ir.Model:
    """Write a copy whose products round by standard operators and multiply in float32, and return it."""
    copy = load_model(model)
    products = rounded_products(copy)
    constants = _constants(copy.graph)
    rounded: dict[tuple[object, ir.Value, int], ir.Value] = {}
    for node in products:
        x = node.inputs[0]
        if x is None:
            continue
        size = math.gcd(int_attribute(node, "K", 0), int_attribute(node, "block_size", 0))
        if (node.graph, x, size) not in rounded:
            rounded[node.graph, x, size] = _round(copy.graph, node, x, size, constants)
        node.replace_input_with(0, rounded[node.graph, x, size])
    _compute_in_floats(products)
    save_model(copy, path)
    return copy


def _compute_in_floats(products: list[ir.Node]) -> None:
    for node in products:
        node.attributes[_LEVEL] = ir.AttrInt64(_LEVEL, _FLOAT32)


def _constants(graph: ir.Graph) -> dict[str, ir.Value]:
    held: dict[str, Array] = {
        "axis": np.array([-1], np.int64),
        "tiny": np.array(_TINY, np.float32),
        "largest": np.array(_LARGEST, np.float32),
    }
    return {name: add_initializer(graph, f"simulated.{name}", array) for name, array in held.items()}


def _round(
    graph: ir.Graph, anchor: ir.Node, x: ir.Value, size: int, constants: dict[str, ir.Value]
) -> ir.Value:
    """Round ``x`` in blocks of ``size`` to multiples of the largest magnitude / 127."""

    def op(op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
        return insert(anchor, op_type, operands, attributes).outputs[0]

    shape = add_initializer(graph, "simulated.blocks", np.array([-1, size], np.int64))
    blocks = op("Reshape", x, shape)
    if graph.opset_imports[""] < _AXES_ARE_INPUTS:
        largest = insert(anchor, "ReduceMax", [op("Abs", blocks)], {"axes": [-1], "keepdims": 1}).outputs[0]
    else:
        largest = op("ReduceMax", op("Abs", blocks), constants["axis"], keepdims=1)
    step = op("Div", op("Max", largest, constants["tiny"]), constants["largest"])
    return op("Reshape", op("Mul", op("Round", op("Div", blocks, step)), step), op("Shape", x))
