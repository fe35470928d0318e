"""Calibrated weight-only quantization, layer by layer, with results in files.

The weights of a layer are quantized when the calibration reaches it, written to a file, and released. So
memory holds one layer, independent of the model's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import load_file

from ....errors import GraphError
from ....progress import Progress
from ....records import dataclass
from ....storage.writing import save_tensors
from ..algorithms import awq, gptq
from ..algorithms.arithmetic import Arithmetic
from ..algorithms.blockwise import BlockFormat, Floats, Quantized, dequantize
from ..algorithms.inputs import Inputs
from ..calibration.activations import Tokens
from ..formats.weight_only import WeightFormats
from .layerwise import HELD_BYTES, Stage, calibrate_stages

_PLAIN_BITS = (
    8  # a tied embedding of so many bits is rounded to nearest: its solution is slow and gains little
)
Solver = Callable[[Floats, BlockFormat, Inputs, Arithmetic], Quantized]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A calibrated quantization algorithm.

    Args:
        solve: quantizes a matrix, given its inputs.
        scales_channels: whether channels are scaled first, as in AWQ.
        follows: whether later layers are calibrated on the outputs of quantized layers.
    """

    solve: Solver
    scales_channels: bool = False
    follows: bool = True


CALIBRATED = {
    "awq": Algorithm(awq.quantize, scales_channels=True, follows=False),
    "gptq": Algorithm(gptq.quantize),
    "awq+gptq": Algorithm(gptq.quantize, scales_channels=True),
}


class QuantizedLayers:
    """The results of a calibration.

    Attributes:
        forms: the formats of the weights.
        factors: divisors of activation channels, by value; ``SmoothQuantPass`` must apply them.
    """

    def __init__(self, forms: WeightFormats, folder: Path) -> None:
        self.forms = forms
        self.factors: dict[str, Floats] = {}
        self._folder = folder
        self._files: dict[str, Path] = {}

    def keep(self, name: str, result: Quantized) -> None:
        """Write the quantized form of a weight to a file."""
        path = self._folder / f"{len(self._files)}.safetensors"
        parts = {part: each for part, each in result._asdict().items() if each is not None}
        # Not NumPy's format: it parses Python, which fails at times in several threads (CPython 3.11).
        save_tensors(parts, path)
        self._files[name] = path

    def result(self, name: str) -> Callable[[], Quantized] | None:
        """Return a function that reads the stored result, None for a weight without one."""
        path = self._files.get(name)
        return None if path is None else lambda: _read(path)


def quantize_layers(
    model: ir.Model,
    algorithm: Algorithm,
    forms: WeightFormats,
    windows: Sequence[Tokens],
    folder: Path,
    *,
    context_length: int,
    arithmetic: Arithmetic | None = None,
    max_bytes: int = HELD_BYTES,
    progress: Progress | None = None,
) -> QuantizedLayers:
    """Quantize the weights of a portable float graph on calibration text.

    Args:
        model: the graph; not changed.
        algorithm: one of ``CALIBRATED``.
        forms: the formats of the weights.
        windows: token ids, each window a separate sequence.
        folder: an empty folder for the results.
        context_length: start positions of the windows are spread over it.
        arithmetic: the inner loops; None for NumPy's.
        max_bytes: limit of activations in memory; the rest is stored in files.
        progress: called after every stage.

    Raises:
        GraphError: a weight or an activation is NaN or infinite.
        UsageError: the text is too short.
    """
    layers, inner = QuantizedLayers(forms, folder), arithmetic or Arithmetic()

    def replace(stage: Stage) -> Mapping[str, Floats]:
        substitutes = _quantize_stage(stage, algorithm, forms, layers, inner)
        return substitutes if algorithm.follows else {}

    embeddings = _embeddings(model.graph, forms, inner) if algorithm.follows else {}
    calibrate_stages(
        model,
        windows,
        replace,
        context_length=context_length,
        substitutes=embeddings,
        max_bytes=max_bytes,
        progress=progress,
    )
    return layers


def _quantize_stage(
    stage: Stage, algorithm: Algorithm, forms: WeightFormats, layers: QuantizedLayers, arithmetic: Arithmetic
) -> dict[str, Floats]:
    """Quantize a stage's weights; return their dequantized form for unscaled inputs."""
    formed = {value: form for value in stage.weights if (form := forms.of(value)) is not None}
    wanted = {value: form for value, form in formed.items() if form.bits < _PLAIN_BITS or not _is_tied(value)}
    matrices = {value: _matrix(value, stage.floats[str(value.name)]) for value in wanted}
    inputs = Inputs(stage.moments)
    scale: Floats = np.ones(len(stage.moments), np.float32)
    if algorithm.scales_channels and len(wanted) == len(stage.weights) and awq.can_scale(stage.source):
        narrowest = min(wanted.values(), key=lambda form: form.bits)
        scale = awq.factors(list(matrices.values()), narrowest, inputs, arithmetic)
        layers.factors[str(stage.source.name)] = scale
        inputs = inputs.scaled(scale)
    substitutes = {}
    for value, form in wanted.items():
        name, tied = str(value.name), _is_tied(value)
        result = algorithm.solve(matrices[value] * scale[:, None], form, inputs, arithmetic)
        layers.keep(name, result)
        if not tied:
            substitutes[name] = dequantize(result, form) / scale[:, None]
    return substitutes


def _embeddings(graph: ir.Graph, forms: WeightFormats, arithmetic: Arithmetic) -> dict[str, Floats]:
    """Return the embeddings, rounded to nearest."""
    rounded = {}
    for value in graph.initializers.values():
        form = forms.of(value) if any(use.node.op_type == "Gather" for use in value.uses()) else None
        if form is not None:
            plain = dataclasses.replace(form, group_size=0)
            rows = np.asarray(value.const_value and value.const_value.numpy(), np.float32)
            rounded[str(value.name)] = np.ascontiguousarray(
                dequantize(arithmetic.round_to_nearest(rows.T, plain), plain).T
            )
    return rounded


def _matrix(value: ir.Value, matrix: Floats) -> Floats:
    """Return a weight as [in, out]."""
    if not np.isfinite(matrix).all():
        raise GraphError(f"weight {value.name} cannot be quantized: it holds NaN or infinity")
    return matrix.T if any(use.node.op_type == "Gemm" for use in value.uses()) else matrix


def _is_tied(value: ir.Value) -> bool:
    return len({use.node.op_type for use in value.uses()}) > 1


def _read(path: Path) -> Quantized:
    parts = load_file(path)
    return Quantized(parts["values"], parts["scales"], parts.get("zero_points"))
