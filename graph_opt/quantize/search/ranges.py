"""Measure histograms of the inputs of linear layers on calibration text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from ....progress import Progress
from ...graph.lazy import shape_of
from ...graph.onnx_files import read_onnx
from ..algorithms.blockwise import Floats
from ..calibration.activations import ActivationReader, Tokens, read_windows
from ..calibration.calibrators import Histogram
from ..formats.integer_products import weight_products

_MAX_BYTES = 256 << 20  # limit of activations in memory


def input_histograms(
    model: Path,
    windows: Sequence[Tokens],
    *,
    context_length: int,
    factors: Mapping[str, Floats] | None = None,
    max_bytes: int = _MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Histogram]:
    """Return a histogram of magnitudes for every input of a linear layer, except that of the head.

    The text is run once per group of layers whose inputs of one window fit in ``max_bytes``, so memory does
    not grow with the text.

    Args:
        model: a portable float graph.
        windows: calibration text, each window run as a separate sequence.
        context_length: start positions of the windows are spread over it.
        factors: divisors that ``SmoothQuantPass`` will apply, by value.
        max_bytes: limit of activations in memory.
        progress: called after every window of every group.

    Returns:
        Histograms by the value's name.

    Raises:
        GraphError: a value is NaN or infinite.
        UsageError: the text has too few tokens.
    """
    longest = max(map(len, windows), default=1)
    groups = list(_groups(read_onnx(model).graph, max_bytes // (4 * longest)))
    histograms: dict[str, Histogram] = {}
    for number, names in enumerate(groups):
        tell = None if progress is None else _Shifted(progress, number, len(groups))
        for values in read_windows(ActivationReader(model, names), windows, context_length, tell):
            for name, value in values.items():
                factor = (factors or {}).get(name)
                histograms.setdefault(name, Histogram()).add(value if factor is None else value / factor)
    return histograms


def _groups(graph: ir.Graph, max_channels: int) -> Iterator[list[str]]:
    """Yield the inputs of all layers in the order of the graph, in groups of at most ``max_channels``."""
    group: dict[str, int] = {}
    for _, x, source in weight_products(graph):
        width = shape_of(source.const_value)[0] if source.const_value is not None else 0
        if group and x.name not in group and sum(group.values()) + width > max_channels:
            yield list(group)
            group = {}
        group[str(x.name)] = width
    if group:
        yield list(group)


class _Shifted:
    """Progress of one of several runs of the text."""

    def __init__(self, progress: Progress, number: int, count: int) -> None:
        self._progress, self._number, self._count = progress, number, count

    def __call__(self, done: int, total: int, name: str = "") -> None:
        self._progress(self._number * total + done, self._count * total, name)
