"""How any graph is quantized to 8-bit integers, and which of its layers are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ....errors import UsageError
from ..calibration.calibrators import CALIBRATORS
from .layers import Layer
from .logarithms import before_logarithms

AUTO = "auto"
MAX_ERROR = 0.1
ACTIVATIONS = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}
_OVERHEAD = 512  # bytes that the nodes and names of a quantized layer take
_FEW_CHANNELS, _FEW_SUMMANDS = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerOptions:
    """How layers are computed in 8-bit integers.

    Args:
        calibrator: how ranges of activations are chosen, one of ``CALIBRATORS``; "auto" tries all of them,
            with and without corrected biases, and keeps what comes nearest to the float outputs; static only.
        activations: "uint8" with zero points, or "int8" symmetric, which TensorRT asks for; static only.
        max_error: layers off by more than this share of their output stay float; None keeps all.
        float_share: share of the layers that may stay float because each of them alone makes much of the
            outputs' error; 0 measures nothing of the kind; static only.
        min_snr: decibels that every output shall reach; as few layers as that takes go back to float, those
            first that change the outputs most; static only.
        exclude: names of weights that stay float.
        correct_biases: take the mean error of every channel out of its bias (M. Nagel et al., "Data-Free
            Quantization Through Weight Equalization and Bias Correction", https://arxiv.org/abs/1906.04721).
        skip_slow: leave convolutions float that int8 kernels of CPUs are slower at: those of few channels.
        carry: compute sums, products and pools between layers in integers, too; static only.
        convolutions: quantize Conv dynamically, which is slower than floats on most CPUs; dynamic only.
        tables: store large tables that rows are looked up in as int8.

    Raises:
        UsageError: an unknown name, or an error that is no share.
    """

    calibrator: str = AUTO
    activations: str = "uint8"
    max_error: float | None = MAX_ERROR
    float_share: float = 0.1
    min_snr: float | None = None
    exclude: tuple[str, ...] = ()
    correct_biases: bool = True
    skip_slow: bool = True
    carry: bool = True
    convolutions: bool = False
    tables: bool = True

    def __post_init__(self) -> None:
        if self.calibrator not in (AUTO, *CALIBRATORS):
            raise UsageError(
                f"unknown calibrator '{self.calibrator}'; the calibrators are: "
                f"{', '.join((AUTO, *CALIBRATORS))}"
            )
        if self.activations not in ACTIVATIONS:
            raise UsageError(f"activations are {' or '.join(ACTIVATIONS)}, not '{self.activations}'")
        if not 0 <= self.float_share <= 1:
            raise UsageError(f"the share of float layers is between 0 and 1, not {self.float_share}")
        if self.max_error is not None and not 0 < self.max_error <= 1:
            raise UsageError(f"the largest error of a layer is a share between 0 and 1, not {self.max_error}")

    def vetoed(self, errors: Mapping[str, float]) -> dict[str, str]:
        """Return the weights whose layers' errors are above the bar, with the reason."""
        if self.max_error is None:
            return {}
        reason = f"its error is above {100 * self.max_error:g} %"
        return {name: reason for name, error in errors.items() if error > self.max_error}


def exempt(
    layers: Iterable[Layer], refused: Mapping[str, str], options: IntegerOptions, *, convolutions: bool
) -> dict[str, str]:
    """Return which weights stay float before anything is measured, and why."""
    layers = list(layers)
    left = {**refused, **before_logarithms(layers)}
    for layer in layers:
        reason = _misfit(layer, options, convolutions)
        if reason is not None:
            left[layer.name] = reason
    return left


def _misfit(layer: Layer, options: IntegerOptions, convolutions: bool) -> str | None:
    if layer.name in options.exclude:
        return "it is excluded"
    is_conv = layer.node.op_type == "Conv"
    if is_conv and not convolutions:
        return "dynamic int8 convolutions are slower than float ones on CPUs (option convolutions)"
    elements, channels = math.prod(layer.shape), layer.shape[layer.axis]
    if 3 * elements <= 5 * channels + _OVERHEAD:
        return "it is so small that its scales would take more room than its int8 values save"
    if is_conv and options.skip_slow and _is_slow(layer):
        return "int8 kernels are slower than float ones for so few channels (option skip_slow)"
    return None


def _is_slow(layer: Layer) -> bool:
    """Return whether int8 kernels of CPUs lose: float ones work in blocks of 16 channels, int8 ones gather.

    Measured in ``docs/any_model_int8.md``. Depthwise ones, about as fast, join their neighbours.
    """
    channels, depthwise = layer.shape[1], layer.shape[1] == 1 and layer.groups > 1
    if depthwise or channels >= _FEW_CHANNELS:
        return False
    window = layer.summands // channels
    return window > 1 and (layer.groups > 1 or layer.summands < _FEW_SUMMANDS)
