"""Measure the error of quantized weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .lazy import Array

_VALUES, _SCALES, _ZERO_POINTS = ".values", ".scales", ".zero_points"


def float_weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the 2-D float initializers by name; nothing is loaded."""
    found = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == 2
    }


def weight_errors(graph: ir.Graph, originals: Mapping[str, ir.TensorProtocol]) -> dict[str, float]:
    """Return the relative error of each quantized weight whose original is in ``originals``.

    Args:
        graph: a graph quantized by carryall, in portable form.
        originals: float weights by name.

    Returns:
        By name, norm(quantized - original) / norm(original), with Frobenius norms.
    """
    stored = graph.initializers
    names = [name.removesuffix(_VALUES) for name in stored if name.endswith(_VALUES)]
    found = [name for name in names if name in originals and f"{name}{_SCALES}" in stored]
    return {name: _error(graph, name, originals[name]) for name in found}


def _error(graph: ir.Graph, name: str, original: ir.TensorProtocol) -> float:
    exact = np.asarray(original.numpy(), np.float32)
    values = _content(graph, f"{name}{_VALUES}")
    if f"{name}{_ZERO_POINTS}" in graph.initializers:
        values -= _expand_blocks(_content(graph, f"{name}{_ZERO_POINTS}"), values.shape)
    values *= _expand_blocks(_content(graph, f"{name}{_SCALES}"), values.shape)
    values -= exact
    return float(np.linalg.norm(values) / max(float(np.linalg.norm(exact)), 1e-30))


def _content(graph: ir.Graph, name: str) -> Array:
    tensor = graph.initializers[name].const_value
    return np.empty(0, np.float32) if tensor is None else tensor.numpy().astype(np.float32)


def _expand_blocks(small: Array, shape: tuple[int, ...]) -> Array:
    """Repeat one element per block to one element per value."""
    small = small if small.ndim == len(shape) else small[None]
    for axis, size in enumerate(shape):
        small = np.repeat(small, size // small.shape[axis], axis)
    return small
