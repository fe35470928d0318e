"""Second moments E[x x^T] of each linear layer's input on calibration text: the Hessian of its error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..edit import nodes_of, weight
from ..lazy import shape_of
from .activations import ActivationReader, Report, Tokens, read_windows
from .blockwise import Floats

_MAX_BYTES = 1 << 30  # of the moments held at a time


class SecondMoments:
    """E[x x^T] by weight, computed when first asked for.

    A pass over the text serves as many layers as ``max_bytes`` holds moments of, in the order of the graph,
    and forgets those before: so memory does not grow with the model. Safe under threads.

    Args:
        model: a portable float graph.
        windows: calibration text, each run as a sequence of its own.
        context_length: windows start at positions all over it.
        max_bytes: of moments held at a time.
    """

    def __init__(
        self,
        model: Path,
        windows: Sequence[Tokens],
        *,
        context_length: int,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._model = model
        self._windows = windows
        self._context_length = context_length
        self._lock = threading.Lock()
        graph = ir.load(model).graph
        self._inputs = _inputs(graph)
        self._groups = _groups(graph, self._inputs, max_bytes)
        self._moments: dict[str, Floats] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def of(self, name: str) -> Floats:
        """Return E[x x^T], [in, in], of the inputs that the weight ``name`` multiplies.

        Raises:
            GraphError: an activation is NaN or infinite.
            UsageError: the text is too short.
        """
        source = self._inputs[name]
        with self._lock:
            if source not in self._moments:
                self._moments = self._measure(next(group for group in self._groups if source in group))
            return self._moments[source]

    def measure_first(self, progress: Report) -> None:
        """Measure the layers that come first, or all if they fit; ``progress`` hears of every window."""
        with self._lock:
            self._moments = self._measure(self._groups[0], progress)

    def _measure(self, names: Sequence[str], progress: Report | None = None) -> dict[str, Floats]:
        sums: dict[str, Floats] = {}
        count = 0  # of tokens
        reader = ActivationReader(self._model, names)
        for values in read_windows(reader, self._windows, self._context_length, progress):
            for name, value in values.items():
                rows = value.reshape(-1, value.shape[-1])
                product = rows.T @ rows
                sums[name] = sums[name] + product if name in sums else product
            count += len(rows)
        return {name: total / np.float32(count) for name, total in sums.items()}


def _inputs(graph: ir.Graph) -> dict[str, str]:
    """Return, by weight, the name of the value it multiplies."""
    found: dict[str, str] = {}
    for op_type in ("MatMul", "Gemm"):
        for node in nodes_of(graph, op_type):
            x, source = node.inputs[0], node.inputs[1]
            if (
                x is not None
                and source is not None
                and weight(source) is not None
                and x.producer() is not None
            ):
                found.setdefault(str(source.name), str(x.name))
    return found


def _groups(graph: ir.Graph, inputs: dict[str, str], max_bytes: int) -> list[list[str]]:
    """Return the inputs of all weights, in the order of the graph, in groups of at most ``max_bytes``."""
    sizes: dict[str, int] = {}
    for name, source in inputs.items():
        sizes[source] = 4 * _width(graph.initializers[name]) ** 2
    order = [str(value.name) for node in graph for value in node.outputs if value.name in sizes]
    groups: list[list[str]] = []
    room = 0
    for source in order:
        if sizes[source] > room or not groups:
            groups.append([])
            room = max_bytes
        groups[-1].append(source)
        room -= sizes[source]
    return groups


def _width(value: ir.Value) -> int:
    """Return how many inputs a weight has: rows for a MatMul, columns for a transposed Gemm."""
    tensor = weight(value)
    is_gemm = any(use.node.op_type == "Gemm" for use in value.uses())
    return 0 if tensor is None else shape_of(tensor)[1 if is_gemm else 0]
