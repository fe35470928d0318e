"""Measure the error of each quantized layer's output, given the float model's inputs of that layer.

So the errors do not include those of earlier layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....progress import Progress
from ...graph.edit import nodes_of
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from ...graph.session import open_part
from ...passes.normalize.float_compute import FloatComputePass
from ...passes.shape_inference import ShapeInferencePass
from ..calibration.activations import ActivationReader, Tokens
from .layerwise import is_matrix

_INPUTS_AT_ONCE = 16  # activations held at a time


def layer_errors(
    reference: Path, quantized: Path, tokens: Tokens, progress: Progress | None = None
) -> dict[str, float]:
    """Measure every product with a weight.

    Args:
        reference: a portable float graph, with the same channel scaling as ``quantized``.
        quantized: its quantized version; products whose output it does not have are skipped.
        tokens: [n], run as one sequence.
        progress: called after every group of layers.

    Returns:
        By weight, norm(quantized output - float output) / norm(float output).

    Raises:
        GraphError: an activation is NaN or infinite.
    """
    graphs = _Parts(reference), _Parts(quantized)
    groups: dict[str, dict[str, str]] = {}
    for node in graphs[0].products():
        x, factor, y = node.inputs[0], node.inputs[1], node.outputs[0]
        if x is not None and factor is not None and graphs[1].has(x, y):
            groups.setdefault(str(x.name), {})[str(y.name)] = str(factor.name)
    errors: dict[str, float] = {}
    names = list(groups)
    for start in range(0, len(names), _INPUTS_AT_ONCE):
        part = names[start : start + _INPUTS_AT_ONCE]
        for name, activation in ActivationReader(reference, part).read(tokens).items():
            outputs = groups[name]
            expected, found = (graph.run(name, activation, list(outputs)) for graph in graphs)
            for index, weight in enumerate(outputs.values()):
                errors[weight] = _relative(found[index], expected[index])
        if progress is not None:
            progress(start + len(part), len(names), "layers")
    return errors


class _Parts:
    """A graph of which parts are run, each from one value to some outputs."""

    def __init__(self, path: Path) -> None:
        self._model = read_onnx(path)
        ShapeInferencePass()(self._model)
        FloatComputePass()(self._model)  # the CPU may have no 16-bit kernels
        self._folder = path.parent
        self._values = {value.name: value for node in self._model.graph for value in node.outputs}

    def products(self) -> list[ir.Node]:
        """Return the nodes that multiply a value by a weight."""
        found = [node for kind in ("MatMul", "Gemm") for node in nodes_of(self._model.graph, kind)]
        return [node for node in found if node.inputs[1] is not None and is_matrix(node.inputs[1])]

    def has(self, *values: ir.Value) -> bool:
        """Return whether the graph computes values with these names."""
        return all(value.name in self._values for value in values)

    def run(self, source: str, x: Array, outputs: Sequence[str]) -> list[Array]:
        """Return the outputs if ``source`` has the value x."""
        values = [self._values[name] for name in outputs]
        part = ir.convenience.extract(self._model.graph, [self._values[source]], values)
        for value in (*part.inputs, *part.outputs):
            value.type = ir.TensorType(ir.DataType.FLOAT)
        session = open_part(ir.Model(part, ir_version=self._model.ir_version), self._folder)
        results: list[Array] = session.run(list(outputs), {source: x})
        return results


def _relative(found: Array, expected: Array) -> float:
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
