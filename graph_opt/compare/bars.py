"""The tolerances of a comparison ("bars"), which depend on the arithmetic of the graphs."""

from __future__ import annotations

import ml_dtypes
import onnx_ir as ir

from ...contract import is_past
from ...records import dataclass
from ..graph.lazy import Array

# Above the error of summing float32 in another order: 1e-7 per sum, times depth and conditioning of the
# network.
MAX_ERROR = 1e-3
# The embedded model in int4, on kernels that round activations to 8 bits, has at most 7e-3 over 1,100
# positions (`carryall verify`, random tokens).
MAX_KL_ROUNDED = 2e-2
# Errors of 1e-2 in all logits, 1e-3 of a standard deviation of 10, cause a KL divergence of 5e-5 (e^2 / 2).
MAX_KL_FLOAT = 1e-4

_WIDEST = 0.25  # upper limit of the relative tolerance for any element type
_ROUNDINGS = 8  # allowed difference in rounding errors of the output's type
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
    """The tolerances of a comparison.

    Attributes:
        max_kl: KL divergence of next-token distributions in nats; None for ``MAX_KL_FLOAT`` if both graphs
            compute in float32, and ``MAX_KL_ROUNDED`` if one rounds activations.
        max_error: largest error of a float output, relative to the range of the reference's values; None for
            ``MAX_ERROR``. Outputs of 16 bits or fewer may differ by 8 rounding errors of their type.
        max_mismatch: share of the elements of an integer, boolean or string output that may differ.
    """

    max_kl: float | None = None
    max_error: float | None = None
    max_mismatch: float = 0.0

    def relative(self, epsilon: float) -> float:
        """Return the relative tolerance for an output whose type has the machine epsilon ``epsilon``."""
        bar = MAX_ERROR if self.max_error is None else self.max_error
        return max(bar, min(_ROUNDINGS * epsilon, _WIDEST))


def epsilon(array: Array) -> float:
    """Return the machine epsilon of an array's float type."""
    return float(ml_dtypes.finfo(array.dtype).eps)


def is_float(array: Array) -> bool:
    """Return whether an array holds floating-point numbers, including those of ml_dtypes."""
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
