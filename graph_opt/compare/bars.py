"""The bars of a comparison, and what they follow from: the arithmetic that a graph is written in."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import onnx_ir as ir

from ...contract import is_past
from ..graph.lazy import Array

# Above what another order of float32 sums costs: 1e-7 a sum, times depth and conditioning of a network.
MAX_ERROR = 1e-3
# The embedded model in int4, on kernels that round activations to 8 bits, has 7e-3 at the worst of
# 1,100 positions (`carryall verify`, random tokens).
MAX_KL_ROUNDED = 2e-2
# Errors of 1e-2 in all logits, 1e-3 of a standard deviation of 10, cost a KL divergence of 5e-5 (e^2 / 2).
MAX_KL_FLOAT = 1e-4

_WIDEST = 0.25  # whatever the element type, an error of a quarter of the range is an error
_ROUNDINGS = 8  # how many roundings of its own type an output may differ by
_ROUNDING_OPERATORS = frozenset(
    {
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "MatMulIntegerToFloat",
        "MatMulInteger",
        "ConvInteger",
        "QMoE",
        "QuantizeLinear",
    }
)
_HALF_TYPES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What a comparison must not exceed.

    Attributes:
        max_kl: KL divergence in nats of next-token distributions; None chooses ``MAX_KL_FLOAT`` if both
            graphs compute in float32, and ``MAX_KL_ROUNDED`` if one rounds activations.
        max_error: largest error of a float output, relative to how far the reference's values range; None
            takes ``MAX_ERROR``. Outputs of 16 bits and fewer are allowed 8 of their own roundings.
        max_mismatch: share of the elements of an integer, boolean or string output that may differ.
    """

    max_kl: float | None = None
    max_error: float | None = None
    max_mismatch: float = 0.0

    def relative(self, epsilon: float) -> float:
        """Return the bar for an output of an element type with this rounding error."""
        bar = MAX_ERROR if self.max_error is None else self.max_error
        return max(bar, min(_ROUNDINGS * epsilon, _WIDEST))


def epsilon(array: Array) -> float:
    """Return the distance from 1 to the next number of an array's float type."""
    return float(ml_dtypes.finfo(array.dtype).eps)


def is_float(array: Array) -> bool:
    """Return whether an array holds floating-point numbers, those of ml_dtypes included."""
    if array.dtype.kind != "V":
        return array.dtype.kind == "f"
    try:
        ml_dtypes.finfo(array.dtype)
    except ValueError:
        return False
    return True


def rounds_activations(model: ir.Model) -> bool:
    """Return whether a graph computes some activations in fewer than 32 bits."""
    for node in model.graph.all_nodes():
        if node.op_type in _ROUNDING_OPERATORS or node.op_type.startswith("QLinear"):
            return True
        level = node.attributes.get("accuracy_level")
        if level is not None and level.as_int() > 1:
            return True
        if any(value.dtype in _HALF_TYPES for value in node.outputs):
            return True
    return any(value.dtype in _HALF_TYPES or _is_quantized_cache(value) for value in model.graph.inputs)


def _is_quantized_cache(value: ir.Value) -> bool:
    return is_past(value.name) and value.dtype is not None and value.dtype.is_integer()
