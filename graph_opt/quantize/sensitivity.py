"""How far 8-bit quantization takes each layer's products from the float ones, on calibration text.

One scale holds a whole activation tensor, so a few channels of large values, as large models have them
(https://arxiv.org/abs/2208.07339), leave no levels for the others. Such layers are found by measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...runtime.errors import GraphError
from ..edit import nodes_of, weight
from .activations import ActivationReader, Report, Tokens
from .blockwise import Floats
from .calibrators import LEVELS
from .integer_products import quantize_columns

_INPUTS_AT_ONCE = 16  # activations held at a time

Rounding = Callable[[str, Floats], Floats]  # (name of the value, value) -> what quantization leaves of it


def product_errors(
    model: Path,
    tokens: Tokens,
    rounding: Rounding,
    *,
    factors: Mapping[str, Floats] | None = None,
    progress: Report | None = None,
) -> dict[str, float]:
    """Measure the error of every product with a weight.

    Args:
        model: a portable float graph.
        tokens: [n], run as one sequence.
        rounding: of the products' inputs.
        factors: by value, what ``SmoothQuantPass`` will divide its channels by.
        progress: told about every group of layers.

    Returns:
        By weight, the root mean square of the error, relative to that of the product.

    Raises:
        GraphError: an activation is NaN or infinite.
    """
    graph = ir.load(model).graph
    weights: dict[str, list[ir.Value]] = {}
    for node in nodes_of(graph, "MatMul"):
        x, source = node.inputs[0], node.inputs[1]
        if x is not None and source is not None and weight(source) is not None:
            weights.setdefault(str(x.name), []).append(source)
    names = list(weights)
    errors: dict[str, float] = {}
    for start in range(0, len(names), _INPUTS_AT_ONCE):
        part = names[start : start + _INPUTS_AT_ONCE]
        for name, activation in ActivationReader(model, part).read(tokens).items():
            factor = (factors or {}).get(name, np.ones(activation.shape[-1], np.float32))
            rows: Floats = (activation.reshape(-1, len(factor)) / factor).astype(np.float32)
            errors |= _errors(rows, rounding(name, rows), factor, weights[name])
        if progress is not None:
            progress(start + len(part), len(names), "sensitivity")
    return errors


def dynamic_rounding(name: str, x: Floats) -> Floats:
    """Return what DynamicQuantizeLinear leaves of a tensor."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = max((high - low) / 255, 1e-30)
    zero = np.rint(-low / scale)
    levels = np.clip(np.rint(x / np.float32(scale)) + zero, 0, 255) - zero
    result: Floats = (levels * scale).astype(np.float32)
    return result


def static_rounding(ranges: Mapping[str, float]) -> Rounding:
    """Return the rounding of ``StaticQuantizationPass``; values without a range stay as they are."""

    def rounding(name: str, x: Floats) -> Floats:
        if name not in ranges:
            return x
        scale = np.float32(ranges[name] / LEVELS)
        result: Floats = np.clip(np.rint(x / scale), -LEVELS - 1, LEVELS) * scale
        return result

    return rounding


def _errors(x: Floats, rounded: Floats, factor: Floats, weights: Sequence[ir.Value]) -> dict[str, float]:
    errors = {}
    for source in weights:
        tensor = weight(source)
        if tensor is None:
            raise GraphError(f"weight {source.name} has no content")
        matrix = np.asarray(tensor.numpy(), np.float32) * factor[:, None]
        values, scales = quantize_columns(matrix)
        exact = x @ matrix
        error = rounded @ (values * scales) - exact
        errors[str(source.name)] = float(np.linalg.norm(error) / max(float(np.linalg.norm(exact)), 1e-30))
    return errors
