"""Measure the effect of rounding errors on the outputs of a graph.

A correct rewrite computes the same sums in another order. Its result equals that of the original with
weights and inputs that differ in their last bits (backward error analysis: Higham, Accuracy and Stability of
Numerical Algorithms, chapter 3). So the reference is run again with each weight and input changed by one
rounding error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.lazy import Array, lazy, shape_of
from ..graph.load import load_model
from ..graph.saving import save_model

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
