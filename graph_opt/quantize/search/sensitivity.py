"""Measure the error of 8-bit quantization of each layer's products on calibration text.

An activation tensor has one scale. If a few channels have large values, as in large models
(https://arxiv.org/abs/2208.07339), few levels are left for the others. Such layers are found by measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....errors import GraphError
from ....progress import Progress
from ...graph.edit import nodes_of, weight
from ...graph.onnx_files import read_onnx
from ..algorithms.blockwise import BlockFormat, Floats, dequantize, round_to_nearest
from ..calibration.activations import ActivationReader, Tokens
from ..calibration.calibrators import LEVELS
from ..formats.integer_products import quantize_columns

_INPUTS_AT_ONCE = 16  # activations in memory at a time

Rounding = Callable[[str, Floats], Floats]  # (name of the value, value) -> dequantized value


def product_errors(
    model: Path,
    tokens: Tokens,
    rounding: Rounding,
    *,
    form: BlockFormat | None = None,
    only: Collection[str] | None = None,
    factors: Mapping[str, Floats] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure the error of every product with a weight.

    Args:
        model: a portable float graph.
        tokens: [n], run as one sequence.
        rounding: quantizes and dequantizes the products' inputs.
        form: the format of weights; None for int8 with a scale per column.
        only: the weights to measure; None for all.
        factors: divisors that ``SmoothQuantPass`` will apply, by value.
        progress: called after every group of layers.

    Returns:
        By weight, norm(quantized product - product) / norm(product).

    Raises:
        GraphError: an activation is NaN or infinite.
    """
    graph = read_onnx(model).graph
    weights: dict[str, list[ir.Value]] = {}
    for node in nodes_of(graph, "MatMul"):
        x, source = node.inputs[0], node.inputs[1]
        if x is None or source is None or weight(source) is None:
            continue
        if only is None or source.name in only:
            weights.setdefault(str(x.name), []).append(source)
    names = list(weights)
    errors: dict[str, float] = {}
    for start in range(0, len(names), _INPUTS_AT_ONCE):
        part = names[start : start + _INPUTS_AT_ONCE]
        for name, activation in ActivationReader(model, part).read(tokens).items():
            factor = (factors or {}).get(name, np.ones(activation.shape[-1], np.float32))
            rows: Floats = (activation.reshape(-1, len(factor)) / factor).astype(np.float32)
            for source in weights[name]:
                errors[str(source.name)] = _error(rows, rounding(name, rows), _scaled(source, factor), form)
        if progress is not None:
            progress(start + len(part), len(names), "sensitivity")
    return errors


def dynamic_rounding(name: str, x: Floats) -> Floats:
    """Return a tensor after DynamicQuantizeLinear and dequantization."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = max((high - low) / 255, 1e-30)
    zero = np.rint(-low / scale)
    levels = np.clip(np.rint(x / np.float32(scale)) + zero, 0, 255) - zero
    result: Floats = (levels * scale).astype(np.float32)
    return result


def float_inputs(name: str, x: Floats) -> Floats:
    """Return ``x``, for weight-only quantization."""
    return x


def static_rounding(ranges: Mapping[str, float]) -> Rounding:
    """Return the rounding of ``StaticQuantizationPass``; values without a range are not changed."""

    def rounding(name: str, x: Floats) -> Floats:
        if name not in ranges:
            return x
        scale = np.float32(ranges[name] / LEVELS)
        result: Floats = np.clip(np.rint(x / scale), -LEVELS - 1, LEVELS) * scale
        return result

    return rounding


def _scaled(source: ir.Value, factor: Floats) -> Floats:
    tensor = weight(source)
    if tensor is None:
        raise GraphError(f"weight {source.name} has no content")
    matrix: Floats = np.asarray(tensor.numpy(), np.float32) * factor[:, None]
    return matrix


def _error(x: Floats, rounded: Floats, matrix: Floats, form: BlockFormat | None) -> float:
    exact = x @ matrix
    error = rounded @ _stored(matrix, form) - exact
    return float(np.linalg.norm(error) / max(float(np.linalg.norm(exact)), 1e-30))


def _stored(matrix: Floats, form: BlockFormat | None) -> Floats:
    """Return a weight after quantization and dequantization."""
    if form is None:
        values, scales = quantize_columns(matrix)
        return values * scales
    fitted = form.fitted(len(matrix))
    return matrix if fitted is None else dequantize(round_to_nearest(matrix, fitted), fitted)
