"""Find the values of a float graph that exceed the range of a 16-bit type on calibration text.

Some models have a few huge values in their residual stream (M. Sun et al., "Massive Activations in Large
Language Models", https://arxiv.org/abs/2402.17762), which overflow in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....contract import is_present
from ....progress import Progress
from ...graph.edit import shared_constant
from ...graph.onnx_files import read_onnx
from ...passes.shape_inference import ShapeInferencePass
from ..calibration.activations import ActivationReader, Tokens, read_windows
from ..formats.half import reached
from ..formats.half_pass import LARGEST

_MARGIN = 4  # other texts may have values larger by this factor
_STEM = ".largest_magnitude"


def largest_magnitudes(
    model: Path, windows: Sequence[Tokens], *, context_length: int, progress: Progress | None = None
) -> dict[str, float]:
    """Return the largest finite magnitude of every value that depends on the embedding.

    Raises:
        GraphError: a value is NaN.
        UsageError: the text has too few tokens.
    """
    loaded = read_onnx(model)
    ShapeInferencePass()(loaded)
    names = _add_maxima(loaded.graph)
    reader = ActivationReader(model, names, loaded)
    largest: dict[str, float] = {}
    for values in read_windows(reader, windows, context_length, progress):
        for name, value in values.items():
            source = name.removesuffix(_STEM)
            largest[source] = max(float(value), largest.get(source, 0.0))
    return largest


def too_large(magnitudes: Mapping[str, float], dtype: ir.DataType) -> list[str]:
    """Return the values whose magnitude times 4 exceeds the range of a 16-bit type."""
    return [name for name, largest in magnitudes.items() if largest * _MARGIN > LARGEST[dtype]]


def _add_maxima(graph: ir.Graph) -> list[str]:
    """Add nodes that compute the largest finite magnitude of every value; return the names of their results.

    Scores of masked positions are infinite in traced graphs; 16-bit types have infinity too.
    """
    zero, names = shared_constant(graph, "half_range.zero", np.zeros((), np.float32)), []
    for node, _ in list(reached(graph)):
        for value in node.outputs:
            if value.dtype != ir.DataType.FLOAT or is_present(value.name):
                continue
            magnitudes, infinite = ir.node("Abs", [value]), ir.node("IsInf", [value])
            finite = ir.node("Where", [infinite.outputs[0], zero, magnitudes.outputs[0]])
            largest = ir.node("ReduceMax", [finite.outputs[0]], {"keepdims": 0})
            largest.outputs[0].name = f"{value.name}{_STEM}"
            graph.extend([magnitudes, infinite, finite, largest])
            names.append(largest.outputs[0].name)
    return names
