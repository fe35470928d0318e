"""Options of int8 quantization of any graph, and the layers that are excluded in advance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ....errors import UsageError
from ....records import dataclass
from ..calibration.calibrators import CALIBRATORS
from .layers import Layer
from .logarithms import before_logarithms

AUTO = "auto"
MAX_ERROR = 0.1
ACTIVATIONS = {"uint8": ir.DataType.UINT8, "int8": ir.DataType.INT8}
_OVERHEAD = 512  # bytes of the nodes and names of a quantized layer
_FEW_CHANNELS, _FEW_SUMMANDS = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerOptions:
    """Options of int8 quantization.

    Args:
        calibrator: the method that selects the ranges of activations, one of ``CALIBRATORS``; "auto" tries
            all, with and without bias correction, and keeps the one closest to the float outputs; static
            only.
        activations: "uint8" with zero points, or symmetric "int8", which TensorRT requires; static only.
        max_error: layers with a larger relative error stay float; None for no limit.
        float_share: share of the layers that may stay float because each alone causes much of the outputs'
            error; 0 disables this measurement; static only.
        min_snr: signal-to-noise ratio in dB that every output must reach; as few layers as needed become
            float again, those with the largest effect on the outputs first; static only.
        exclude: names of weights that stay float.
        correct_biases: subtract the mean error of every channel from its bias (M. Nagel et al., "Data-Free
            Quantization Through Weight Equalization and Bias Correction", https://arxiv.org/abs/1906.04721).
        skip_slow: keep convolutions float for which int8 CPU kernels are slower: those with few channels.
        carry: also compute sums, products and pools between layers in integers; static only.
        convolutions: quantize Conv dynamically, which is slower than float on most CPUs; dynamic only.
        tables: store large lookup tables as int8.

    Raises:
        UsageError: a name is unknown, or a number is out of range.
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
            raise UsageError(f"activations must be {' or '.join(ACTIVATIONS)}, found '{self.activations}'")
        if not 0 <= self.float_share <= 1:
            raise UsageError(f"float_share must be between 0 and 1, found {self.float_share}")
        if self.max_error is not None and not 0 < self.max_error <= 1:
            raise UsageError(f"max_error must be above 0 and at most 1, found {self.max_error}")

    def vetoed(self, errors: Mapping[str, float]) -> dict[str, str]:
        """Return the weights whose layers exceed ``max_error``, with the reason."""
        if self.max_error is None:
            return {}
        reason = f"its error is above {100 * self.max_error:g} %"
        return {name: reason for name, error in errors.items() if error > self.max_error}


def exempt(
    layers: Iterable[Layer], refused: Mapping[str, str], options: IntegerOptions, *, convolutions: bool
) -> dict[str, str]:
    """Return the weights that stay float before measurements, with the reasons."""
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
        return "its scales would need more bytes than its int8 values save"
    if is_conv and options.skip_slow and _is_slow(layer):
        return "int8 kernels are slower than float ones for few channels (option skip_slow)"
    return None


def _is_slow(layer: Layer) -> bool:
    """Return whether int8 CPU kernels are slower than float ones, which use blocks of 16 channels.

    Measured in ``docs/any_model_int8.md``. Depthwise convolutions are about as fast, and are quantized.
    """
    channels, depthwise = layer.shape[1], layer.shape[1] == 1 and layer.groups > 1
    if depthwise or channels >= _FEW_CHANNELS:
        return False
    window = layer.summands // channels
    return window > 1 and (layer.groups > 1 or layer.summands < _FEW_SUMMANDS)
