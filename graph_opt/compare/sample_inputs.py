"""Inputs made up for a graph, so that it can be run without any data."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...errors import UsageError
from ..graph.lazy import Array

_UNKNOWN_SIZE = 3  # of every axis that the graph leaves open


def sample_inputs(graph: ir.Graph, *, seed: int = 0) -> dict[str, Array]:
    """Make up a value for each input that has no default.

    Args:
        graph: whose inputs state their types.
        seed: of the random numbers: floats of a normal distribution, integers 0 and 1.

    Raises:
        UsageError: an input is no tensor of numbers of known rank.
    """
    rng = np.random.default_rng(seed)
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    return {str(value.name): _sample(value, rng) for value in inputs}


def _sample(value: ir.Value, rng: np.random.Generator) -> Array:
    numbers = isinstance(value.type, ir.TensorType) and value.dtype not in (None, ir.DataType.STRING)
    if not numbers or value.shape is None or value.dtype is None:
        raise UsageError(f"nothing can be made up for input {value.name} of type {value.type}; give --inputs")
    shape = [size if isinstance(size, int) else _UNKNOWN_SIZE for size in value.shape]
    if value.dtype.is_integer() or value.dtype == ir.DataType.BOOL:
        return rng.integers(0, 2, shape).astype(value.dtype.numpy())
    return rng.standard_normal(shape).astype(value.dtype.numpy())
