"""Fuse a root mean square norm over the last axis into RMSNormalization.

Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). The search starts at the mean of squares;
that the nodes after it compute the norm is proven by evaluation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...analysis.region import Region, close, region
from ...graph.edit import (
    constant,
    insert,
    remove_unused,
    replace,
    shared_constant,
    sole_consumer,
    static_size,
    weight,
)
from ..base import GraphPass

_MAX_STEPS = 6
_LONG = 64  # fixed axes of this size or more are probed with a smaller size
_ROWS = np.array([1e-4, 1e-2, 1.0, 30.0, 1e4], np.float32)


class FuseRMSNormPass(GraphPass):
    """Replace every RMS norm that is written as several nodes."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Try every mean of squares."""
        for node in list(graph):
            if node.graph is not graph or node.op_type != "ReduceMean" or node.domain:
                continue
            x = _squared(node.inputs[0])
            if x is None:
                continue
            reason = self._fuse(graph, x, node)
            if reason is not None:
                self.refuse(node, reason)
            else:
                self.fired += 1

    @staticmethod
    def _fuse(graph: ir.Graph, x: ir.Value, mean: ir.Node) -> str | None:
        size = static_size(x, -1)
        if x.shape is None or size is None:
            return "the size of the last axis is unknown"
        normed = _first_of_shape(mean.outputs[0], x)
        if normed is None:
            return "no value with the input's shape follows the mean of squares"
        part = region([x], normed)
        if isinstance(part, str):
            return part
        epsilon = _epsilon(part, size)
        if epsilon is None:
            return "the nodes after the mean of squares do not compute an RMS norm"
        scale, output = _scaled(normed, size)
        if scale is None:
            scale = shared_constant(graph, f"ones.{size}", np.ones(size, np.float32))
        attributes = {"axis": -1, "epsilon": epsilon}
        anchor = output.producer()
        if anchor is None:
            raise AssertionError("unreachable: the output of a norm has a producer")
        fused = insert(anchor, "RMSNormalization", [x, scale], attributes)
        replace(output, fused.outputs[0])
        remove_unused(graph, anchor)
        return None


def _squared(value: ir.Value | None) -> ir.Value | None:
    """Return x if ``value`` is Pow(x, 2) or Mul(x, x), else None."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in ("Pow", "Mul") or node.domain:
        return None
    left, right = node.inputs
    if node.op_type == "Mul":
        return left if left is right else None
    exponent = constant(right)
    return left if exponent is not None and exponent.size == 1 and exponent.item() == 2 else None


def _first_of_shape(value: ir.Value, like: ir.Value) -> ir.Value | None:
    """Follow sole consumers until a value has the shape of ``like``."""
    for _ in range(_MAX_STEPS):
        reader = sole_consumer(value)
        if reader is None:
            return None
        value = reader.outputs[0]
        if value.shape is not None and value.shape == like.shape:
            return value
    return None


def _epsilon(part: Region, size: int) -> float | None:
    """Return the epsilon with which a region is an RMS norm, else None; all its constants are tried."""
    rng = np.random.default_rng(size)
    shape = _probe_shape(part.inputs[0], size)
    x = rng.standard_normal(shape).astype(np.float32) * np.resize(_ROWS, shape[-2])[:, None]
    rest = part(x)
    for value in part.constants:
        content = constant(value)
        if content is None or content.size != 1 or not 0 <= content.item() < 1e-2:
            continue
        if _equal_by_row(rest, _rms_norm(x, content.item())):
            return float(content.item())
    return 0.0 if _equal_by_row(rest, _rms_norm(x, 0.0)) else None


def _probe_shape(value: ir.Value, size: int) -> list[int]:
    """Return a probe shape with at least ``len(_ROWS)`` rows, whose dynamic axes have different sizes."""
    fixed = [static_size(value, axis) for axis in range(len(value.shape or ()) - 1)]
    lead = [number if number and number < _LONG else axis + 2 for axis, number in enumerate(fixed[:-1])]
    rows = fixed[-1] if fixed and fixed[-1] and fixed[-1] < _LONG else 0
    return [*lead, max(rows, len(_ROWS)), size]


def _rms_norm(x: npt.NDArray[np.float32], epsilon: float) -> npt.NDArray[np.float32]:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + epsilon), np.float32)


def _equal_by_row(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    """Compare rows separately, because epsilon matters only in rows of small values."""
    return found.shape == expected.shape and all(
        close(found[..., row, :], expected[..., row, :]) for row in range(found.shape[-2])
    )


def _scaled(normed: ir.Value, size: int) -> tuple[ir.Value | None, ir.Value]:
    """Return the weight that multiplies the norm and the product, or None and the norm."""
    reader = sole_consumer(normed)
    if reader is not None and reader.op_type == "Mul" and not reader.domain:
        for operand in reader.inputs:
            tensor = weight(operand)
            if operand is not None and tensor is not None and tuple(tensor.shape.numpy()) == (size,):
                return operand, reader.outputs[0]
    return None, normed
