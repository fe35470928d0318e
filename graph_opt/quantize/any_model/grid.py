"""8-bit quantization grids: scale and zero point of activations, scales of weights and biases."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import GraphError
from ....records import dataclass
from ...graph.lazy import Array

# Levels of weights. -128 is not used: the negative of each level is a level.
LOWEST, HIGHEST = -127, 127
_SMALLEST_SCALE = 1e-30  # it and its reciprocal are normal float32 numbers
_MAX_INT32 = float(2**31 - 1)
_BIAS_LEVELS = 2**24  # levels of a bias whose weights are all 0

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """A per-tensor scale and zero point: level q represents (q - zero_point) * scale.

    Attributes:
        scale: positive.
        zero_point: the level that represents 0.
        dtype: UINT8 or INT8.
    """

    scale: float
    zero_point: int
    dtype: ir.DataType

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest level."""
        return (0, 255) if self.dtype == ir.DataType.UINT8 else (-128, 127)

    def round(self, values: Floats) -> Floats:
        """Quantize and dequantize values, as QuantizeLinear and DequantizeLinear do."""
        scale = np.float32(self.scale)
        levels = np.clip(np.rint(values / scale) + self.zero_point, *self.limits)
        result: Floats = ((levels - self.zero_point) * scale).astype(np.float32)
        return result


def grid(low: float, high: float, dtype: ir.DataType) -> Grid:
    """Return the finest grid that covers 0 and the range from ``low`` to ``high``.

    UINT8 is asymmetric; INT8 is symmetric with zero point 0.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if dtype == ir.DataType.INT8:
        return Grid(_usable(max(-low, high) / HIGHEST), 0, dtype)
    scale = _usable((high - low) / 255)
    return Grid(scale, round(-low / scale), dtype)


def _usable(scale: float) -> float:
    return float(np.float32(max(scale, _SMALLEST_SCALE)))


def channel_scales(
    content: Array, axis: int, bias: Floats | None = None, input_scale: float | None = None
) -> Floats:
    """Return one scale per channel for the int8 values of a weight.

    Args:
        content: the float weight.
        axis: its channel axis.
        bias: [channels]; kernels store it as int32 with scale input_scale * result, so the scale of a
            channel must be large enough for it.
        input_scale: the scale of the layer's input.

    Returns:
        [channels], positive. A channel of zeros has the largest scale of the others, so that its bias stays
        exact.

    Raises:
        GraphError: the weight holds NaN or infinity.
    """
    others = tuple(index for index in range(content.ndim) if index != axis % content.ndim)
    largest = np.abs(content).max(axis=others, initial=0).astype(np.float64)
    if not np.isfinite(largest).all():
        raise GraphError("it holds NaN or infinity")
    scales = np.maximum(largest / HIGHEST, _SMALLEST_SCALE)
    if bias is not None and input_scale is not None:
        sizes = np.abs(bias.astype(np.float64)) / input_scale
        scales = np.maximum(scales, sizes / (_MAX_INT32 / 2))
        usual = scales[largest > 0].max(initial=0) or sizes.max(initial=0) / _BIAS_LEVELS or 1.0
    else:
        usual = scales[largest > 0].max(initial=0) or 1.0
    result: Floats = np.where(largest > 0, scales, np.maximum(scales, usual)).astype(np.float32)
    return result


def round_weight(content: Array, axis: int, scales: Floats) -> npt.NDArray[np.int8]:
    """Return the int8 levels of a weight, in its shape."""
    shape = [-1 if index == axis % content.ndim else 1 for index in range(content.ndim)]
    levels = np.rint(content.astype(np.float32) / scales.reshape(shape))
    result: npt.NDArray[np.int8] = np.clip(levels, LOWEST, HIGHEST).astype(np.int8)
    return result


def round_bias(bias: Floats, input_scale: float, scales: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
    """Return the int32 levels [channels] of a bias, and their scales [channels]."""
    steps = (np.float32(input_scale) * scales).astype(np.float32)
    steps = np.maximum(steps, np.float32(_SMALLEST_SCALE))
    levels = np.clip(np.rint(bias.astype(np.float64) / steps), -_MAX_INT32, _MAX_INT32)
    return levels.astype(np.int32), steps
