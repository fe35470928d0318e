"""Measure the effect of rounding errors on the outputs of a graph.

A correct rewrite computes the same sums in another order. Its result equals that of the original with
weights and inputs that differ in their last bits (backward error analysis: Higham, Accuracy and Stability of
Numerical Algorithms, chapter 3). So the reference is run again with each weight and input changed by one
rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...storage.scratch import scratch_folder
from ..graph.edit import add_initializer, insert, int_attribute
from ..graph.lazy import Array, lazy, shape_of
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


_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE}
# Kernels compute a sigmoid as 1/2 plus an odd function: a result of 1e-6 has the rounding error of 1/2.
_MAGNITUDES = {"Sigmoid": 1.0, "HardSigmoid": 1.0}
_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


def write_rounded(model: Path, path: Path, *, seed: int = 0) -> None:
    """Write a copy of a graph whose float weights are changed by -1, 0 or 1 unit in the last place."""
    graph_model = load_model(model)
    number = 0
    for graph in graph_model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1:
                number += 1
                value.const_value = _rounded(tensor, str(value.name), [seed, number])
    save_model(graph_model, path)


def rounded_feed(feed: Mapping[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """Return float inputs changed by -1, 0 or 1 unit in the last place; whole-number inputs are unchanged."""
    rng = np.random.default_rng(seed)
    return {
        name: [_moved(array, rng) for array in content] if isinstance(content, list) else _moved(content, rng)
        for name, content in feed.items()
    }


def _rounded(tensor: ir.TensorProtocol, name: str, seed: list[int]) -> ir.TensorProtocol:
    def compute() -> Array:
        return _moved(tensor.numpy(), np.random.default_rng(seed))

    moved = lazy(compute, tensor.dtype, shape_of(tensor))
    moved.name = name
    return moved


def _moved(array: Array, rng: np.random.Generator) -> Array:
    if array.dtype.kind != "f" or not array.size:
        return array
    finite = array[np.isfinite(array)]
    if (finite == np.round(finite)).all():
        return array
    signs = rng.integers(-1, 2, array.shape)
    step = np.spacing(np.abs(array))
    moved = array + np.where(np.isfinite(array) & (array != 0), signs * step, 0)
    return np.asarray(moved).astype(array.dtype)


def output_magnitudes(model: Path) -> dict[str, float]:
    """Return the magnitude of the numbers that outputs are computed from, where it is not their own."""
    found = {str(output.name): _producer(output) for output in load_model(model).graph.outputs}
    return {name: _MAGNITUDES[kind] for name, kind in found.items() if kind in _MAGNITUDES}


def _producer(value: ir.Value) -> str | None:
    """Return the operator that computed a value, before operators that only move elements."""
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return None if node is None else node.op_type
