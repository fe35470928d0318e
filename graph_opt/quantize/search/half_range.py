"""Which values of a float graph a 16-bit type cannot hold, measured on calibration text.

Some models keep a few huge values in their residual stream (M. Sun et al., "Massive Activations in Large
Language Models", https://arxiv.org/abs/2402.17762); in fp16 they become infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from ....contract import is_present
from ....progress import Progress
from ..calibration.activations import ActivationReader, Tokens, read_windows
from ..formats.half import reached
from ..formats.half_pass import LARGEST

_MARGIN = 4  # other texts may reach values as many times larger
_STEM = ".largest_magnitude"


def largest_magnitudes(
    model: Path, windows: Sequence[Tokens], *, context_length: int, progress: Progress | None = None
) -> dict[str, float]:
    """Measure the largest magnitude of every value that the embedding reaches; only numbers leave the graph.

    Raises:
        GraphError: a value is NaN or infinite.
        UsageError: the text is too short.
    """
    loaded = ir.load(model)
    common.ShapeInferencePass()(loaded)
    names = _add_maxima(loaded.graph)
    reader = ActivationReader(model, names, loaded)
    largest: dict[str, float] = {}
    for values in read_windows(reader, windows, context_length, progress):
        for name, value in values.items():
            source = name.removesuffix(_STEM)
            largest[source] = max(float(value), largest.get(source, 0.0))
    return largest


def too_large(magnitudes: Mapping[str, float], dtype: ir.DataType) -> list[str]:
    """Return the values that a 16-bit type cannot hold, or hardly."""
    return [name for name, largest in magnitudes.items() if largest * _MARGIN > LARGEST[dtype]]


def _add_maxima(graph: ir.Graph) -> list[str]:
    """Compute the largest magnitude of every value; return the names of the results."""
    names = []
    for node, _ in list(reached(graph)):
        for value in node.outputs:
            if value.dtype != ir.DataType.FLOAT or is_present(value.name):
                continue
            magnitudes = ir.node("Abs", [value])
            largest = ir.node("ReduceMax", [magnitudes.outputs[0]], {"keepdims": 0})
            largest.outputs[0].name = f"{value.name}{_STEM}"
            graph.extend([magnitudes, largest])
            names.append(largest.outputs[0].name)
    return names
