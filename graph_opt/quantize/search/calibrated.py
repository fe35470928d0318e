"""Calibrated weight-only quantization, layer by layer, with results in files.

The weights of a layer are quantized when the calibration reaches it, written to a file, and released. So
memory holds one layer, independent of the model's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from safetensors import safe_open

from ....errors import GraphError
from ....progress import Progress
from ....records import dataclass
from ....storage.cache import CachedParts
from ....storage.writing import save_tensors
from ..algorithms import awq, gptq
from ..algorithms.arithmetic import Arithmetic
from ..algorithms.blockwise import BlockFormat, Floats, Quantized, dequantize
from ..algorithms.cores import single_products
from ..algorithms.inputs import Inputs
from ..calibration.activations import Tokens
from ..formats.weight_only import WeightFormats
from .layerwise import HELD_BYTES, Stage, calibrate_stages

_PLAIN_BITS = (
    8  # a tied embedding of so many bits is rounded to nearest: its solution is slow and gains little
)
_STAGE_FILE, _FACTORS = "stage.safetensors", "factors"
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

    def __init__(self, forms: WeightFormats) -> None:
        self.forms = forms
        self.factors: dict[str, Floats] = {}
        self._stages: dict[str, Path] = {}

    def result(self, name: str) -> Callable[[], Quantized] | None:
        """Return a function that reads the stored result, None for a weight without one."""
        path = self._stages.get(name)
        return None if path is None else lambda: _read(path, name)

    def take(self, stage: Stage, path: Path) -> dict[str, Quantized]:
        """Return the stored results of a stage's weights, and know them from now on."""
        with safe_open(path, "numpy") as file:
            stored = set(file.keys())
            if _FACTORS in stored:
                self.factors[str(stage.source.name)] = file.get_tensor(_FACTORS)
        names = [str(value.name) for value in stage.weights if f"values {value.name}" in stored]
        self._stages |= dict.fromkeys(names, path)
        return {name: _read(path, name) for name in names}


def quantize_layers(
    model: ir.Model,
    algorithm: Algorithm,
    forms: WeightFormats,
    windows: Sequence[Tokens],
    stages: CachedParts,
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
        stages: holds the results of each stage, by the name of its value.
        context_length: start positions of the windows are spread over it.
        arithmetic: the inner loops; None for NumPy's.
        max_bytes: limit of activations in memory; the rest is stored in files.
        progress: called after every stage.

    Raises:
        GraphError: a weight or an activation is NaN or infinite.
        UsageError: the text is too short.
    """
    layers, inner = QuantizedLayers(forms), arithmetic or Arithmetic()

    def replace(stage: Stage) -> Mapping[str, Floats]:
        folder = stages.folder(
            str(stage.source.name), lambda folder: _quantize_stage(stage, algorithm, forms, folder, inner)
        )
        results = layers.take(stage, folder / _STAGE_FILE)
        return _substitutes(stage, results, layers) if algorithm.follows else {}

    with single_products():
        calibrate_stages(
            model,
            windows,
            replace,
            context_length=context_length,
            substitutes=_embeddings(model.graph, forms, inner) if algorithm.follows else {},
            without_moments=stages.is_kept,
            max_bytes=max_bytes,
            progress=progress,
        )
    return layers


def _quantize_stage(
    stage: Stage, algorithm: Algorithm, forms: WeightFormats, folder: Path, arithmetic: Arithmetic
) -> None:
    """Write the quantized weights of a stage."""
    formed = {value: form for value in stage.weights if (form := forms.of(value)) is not None}
    wanted = {value: form for value, form in formed.items() if form.bits < _PLAIN_BITS or not _is_tied(value)}
    matrices = {value: _matrix(value, stage.floats[str(value.name)]) for value in wanted}
    inputs, tensors = Inputs(stage.moments), dict[str, Any]()
    scale: Floats = np.ones(len(stage.moments), np.float32)
    if algorithm.scales_channels and len(wanted) == len(stage.weights) and awq.can_scale(stage.source):
        narrowest = min(wanted.values(), key=lambda form: form.bits)
        tensors[_FACTORS] = scale = awq.factors(list(matrices.values()), narrowest, inputs, arithmetic)
        inputs = inputs.scaled(scale)
    for value, form in wanted.items():
        result = algorithm.solve(matrices[value] * scale[:, None], form, inputs, arithmetic)
        parts = result._asdict().items()
        tensors |= {f"{part} {value.name}": each for part, each in parts if each is not None}
    # Not NumPy's format: it parses Python, which fails at times in several threads (CPython 3.11).
    save_tensors(tensors, folder / _STAGE_FILE)


def _substitutes(
    stage: Stage, results: Mapping[str, Quantized], layers: QuantizedLayers
) -> dict[str, Floats]:
    """Return the dequantized form of a stage's weights, for unscaled inputs."""
    factors = layers.factors.get(str(stage.source.name))
    substitutes = dict[str, Floats]()
    for value in stage.weights:
        result, form = results.get(str(value.name)), layers.forms.of(value)
        if result is not None and form is not None and not _is_tied(value):
            floats = dequantize(result, form)
            substitutes[str(value.name)] = floats if factors is None else floats / factors[:, None]
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


def _read(path: Path, name: str) -> Quantized:
    with safe_open(path, "numpy") as file:
        stored = set(file.keys())
        keys = {part: key for part in Quantized._fields if (key := f"{part} {name}") in stored}
        parts = {part: file.get_tensor(key) for part, key in keys.items()}
    return Quantized(parts["values"], parts["scales"], parts.get("zero_points"))
