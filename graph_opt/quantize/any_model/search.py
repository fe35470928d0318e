"""Search for the best static quantization: calibrator, bias correction, and the layers that stay float.

Every candidate is run, because the effect of a layer's error on the outputs is not known in advance.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ....progress import Progress as Progress
from ....records import dataclass
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from ..calibration.calibrators import CALIBRATORS
from .grid import Floats, Grid
from .layers import Layer, find_layers
from .options import ACTIVATIONS, AUTO, IntegerOptions, exempt
from .placement import CARRIED
from .ranges import grids, value_ranges
from .report import output_fidelity
from .static import StaticGraphPass, quantized_values
from .switches import output_noise
from .twin import LayerError, static_errors
from .values import Feed, GraphValues

_MEASURED = 6  # samples for measuring layers, the first ones
_DOMINANT = 8  # a layer is dominant if it causes at least 1/8 of the remaining noise
_SWITCHED = 2  # samples for measuring the effect of single layers
_JUDGED = 8  # samples for comparing candidates, the last ones


@dataclass(frozen=True, slots=True)
class QuantizationCandidate:
    """One way to quantize a model.

    Attributes:
        calibrator: the calibrator of the ranges.
        grids: the grids of all quantized values, by name.
        biases: corrected biases, by the name of a layer's output.
        errors: relative errors of all layers that could be quantized, by weight.
        left_float: by weight, the reason why it stays float.
        carried: operators between layers that are computed in integers.
    """

    calibrator: str
    grids: Mapping[str, Grid]
    biases: Mapping[str, Floats]
    errors: Mapping[str, float]
    left_float: dict[str, str]
    carried: Collection[str]

    @property
    def quantizer(self) -> StaticGraphPass:
        """The pass that quantizes the model in this way."""
        return StaticGraphPass(self.grids, exclude=self.left_float, carried=self.carried, biases=self.biases)

    @property
    def layer_errors(self) -> dict[str, float]:
        """Errors of the layers that are quantized."""
        return {name: error for name, error in self.errors.items() if name not in self.left_float}


class StaticSearch:
    """Finds the best candidate for a saved float graph.

    Args:
        model: the graph.
        feeds: samples.
        options: the options.
        progress: called after every sample that layers are measured on.
    """

    def __init__(
        self, model: Path, feeds: Sequence[Feed], options: IntegerOptions, progress: Progress | None
    ) -> None:
        self._model = model
        self._feeds = feeds
        self._options = options
        self._progress = progress
        graph = read_onnx(model).graph
        self._layers, refused = find_layers([graph])
        self._exempt = exempt(self._layers, refused, options, convolutions=True)
        self._carried: Collection[str] = CARRIED if options.carry else ()
        names = quantized_values(graph, exclude=self._exempt, carried=self._carried)
        self._ranges = value_ranges(model, names, feeds)

    def best(self) -> QuantizationCandidate:
        """Return the candidate closest to the float outputs, with more float layers if ``min_snr`` asks."""
        options = self._options
        chosen = list(CALIBRATORS) if options.calibrator == AUTO else [options.calibrator]
        candidates = [self._candidate(calibrator) for calibrator in chosen]
        best = candidates[0] if len(candidates) == 1 else max(candidates, key=self.snr)
        if options.calibrator == AUTO and best.biases:
            plain = self._candidate(best.calibrator, correct=False)
            best = max((best, plain), key=self.snr)
        if options.float_share == 0 and self.reaches_target(best):
            return best
        noise = output_noise(
            self._model,
            self._feeds[-_SWITCHED:],
            best.grids,
            exclude=best.left_float,
            biases=best.biases,
            progress=self._progress,
        )
        spared = _without(
            best, dominant(noise, options.float_share), "it alone causes much of the outputs' error"
        )
        best = max((best, spared), key=self.snr)
        return best if self.reaches_target(best) else self._fewer(best, noise)

    def reaches_target(self, candidate: QuantizationCandidate) -> bool:
        """Return whether all outputs reach ``min_snr``."""
        return self._options.min_snr is None or self.snr(candidate) >= self._options.min_snr

    def snr(self, candidate: QuantizationCandidate) -> float:
        """Return the lowest signal-to-noise ratio of an output, in dB."""
        model = read_onnx(self._model)
        candidate.quantizer(model)
        reader = GraphValues(model, [str(one.name) for one in model.graph.outputs], self._model.parent)
        found = output_fidelity(self._expected, [reader.run(feed) for feed in self._feeds[-_JUDGED:]])
        return min((one.snr for one in found.values()), default=0.0)

    @functools.cached_property
    def _expected(self) -> list[dict[str, Array]]:
        model = read_onnx(self._model)
        reader = GraphValues(model, [str(one.name) for one in model.graph.outputs], self._model.parent)
        return [reader.run(feed) for feed in self._feeds[-_JUDGED:]]

    def _candidate(self, calibrator: str, *, correct: bool = True) -> QuantizationCandidate:
        ranges = grids(self._ranges, calibrator, ACTIVATIONS[self._options.activations])
        errors, biases = self._errors(ranges, {}), {}
        if correct and self._options.correct_biases:
            biases = _corrected(self._layers, errors)
            errors = self._errors(ranges, biases)
        relative = {name: error.relative for name, error in errors.items()}
        left = {**self._exempt, **self._options.vetoed(relative)}
        return QuantizationCandidate(calibrator, ranges, biases, relative, left, self._carried)

    def _errors(self, ranges: Mapping[str, Grid], biases: Mapping[str, Floats]) -> dict[str, LayerError]:
        return static_errors(
            self._model,
            self._feeds[:_MEASURED],
            ranges,
            exclude=self._exempt,
            biases=biases,
            progress=self._progress,
        )

    def _fewer(self, candidate: QuantizationCandidate, noise: Mapping[str, float]) -> QuantizationCandidate:
        """Return the candidate with the fewest additional float layers that reaches the target, by bisection.

        Layers become float in decreasing order of their effect on the outputs. The last layer stays
        quantized.
        """
        kept = candidate.layer_errors
        order = sorted((name for name in noise if name in kept), key=noise.__getitem__, reverse=True)
        reason = f"the outputs would not reach {self._options.min_snr:g} dB with it quantized"
        low, high = 0, len(order) - 1  # low layers are not enough, high layers are assumed to be
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.reaches_target(_without(candidate, order[:middle], reason))
            low, high = (low, middle) if enough else (middle, high)
        return _without(candidate, order[:high], reason)


def dominant(noise: Mapping[str, float], share: float) -> list[str]:
    """Return the layers that each cause at least 1/8 of the noise that remains without the earlier ones.

    Args:
        noise: relative error energy of single layers; energies of small errors are additive.
        share: maximum share of the layers to return.
    """
    order = sorted(noise, key=noise.__getitem__, reverse=True)
    left, names = sum(noise.values()), []
    for name in order[: int(len(order) * share)]:
        if noise[name] * _DOMINANT < left:
            break
        names.append(name)
        left -= noise[name]
    return names


def _without(candidate: QuantizationCandidate, names: Iterable[str], reason: str) -> QuantizationCandidate:
    return replace(candidate, left_float={**candidate.left_float, **dict.fromkeys(names, reason)})


def _corrected(layers: Iterable[Layer], errors: Mapping[str, LayerError]) -> dict[str, Floats]:
    """Return corrected biases by the name of a layer's output; a MatMul without a bias gets none."""
    biases: dict[str, Floats] = {}
    for layer in layers:
        name = str(layer.output.name)
        shift = errors[layer.name].shifts.get(name) if layer.name in errors else None
        bias = layer.bias_content()
        if shift is None or (bias is None and layer.node.op_type == "MatMul"):
            continue
        biases[name] = shift if bias is None else (bias + shift).astype(np.float32)
    return biases
