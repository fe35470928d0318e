"""Measure the cost of rounding single weights, with a portable graph whose weights are inputs.

The float weights are mapped from disk, not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....contract import LOGITS
from ....errors import GraphError
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from ...graph.session import open_part
from ..algorithms.blockwise import BlockFormat, Floats, dequantize, round_to_nearest
from ..algorithms.cores import on_all_cores, threads_each
from ..calibration.activations import Tokens, fresh_sequence, placed
from ..formats.weight_only import WeightFormats, summed_axis
from .layerwise import is_matrix


class WeightInputs:
    """Compares predictions on a text with some weights rounded to nearest with the float predictions.

    Args:
        model: a portable float graph.
        windows: calibration text; the float predictions on all of it are kept in memory.
        forms: the formats of the weights.
        context_length: start positions of the windows are spread over it.

    Attributes:
        forms: the format of every weight that has one, by name.
        sizes: the number of values of each of these weights.
        float_sizes: the number of values of every other weight matrix, which stays float.
    """

    def __init__(
        self, model: Path, windows: Sequence[Tokens], forms: WeightFormats, *, context_length: int
    ) -> None:
        loaded = read_onnx(model)
        graph = loaded.graph
        wanted = {value: form for value in graph.initializers.values() if (form := forms.of(value))}
        self.forms = {str(value.name): form for value, form in wanted.items()}
        self.float_sizes = {
            str(value.name): value.const_value.size
            for value in graph.initializers.values()
            if value not in wanted and is_matrix(value) and value.const_value is not None
        }
        self._axes = {str(value.name): summed_axis(value) or 0 for value in wanted}
        self._weights: dict[str, Array] = {}
        for value in wanted:
            if value.const_value is not None:
                self._weights[str(value.name)] = value.const_value.numpy()
            del graph.initializers[str(value.name)]
            graph.inputs.append(value)
        self.sizes = {name: weight.size for name, weight in self._weights.items()}
        del graph.outputs[1:]
        shapes = {str(value.name): tuple(value.shape or ()) for value in graph.inputs}
        self._feeds = [
            fresh_sequence(shapes, tokens, start) for tokens, start in placed(windows, context_length)
        ]
        self._session: Any = open_part(loaded, model.parent, threads=threads_each(self._feeds))
        self._expected = on_all_cores(lambda feed: self._predict(feed, {}), self._feeds)

    def divergence(self, forms: Mapping[str, BlockFormat | None]) -> float:
        """Return the mean Kullback-Leibler divergence per token, in nats, with these weights rounded.

        Raises:
            GraphError: the predictions hold NaN or infinity.
        """
        rounded = {name: self._rounded(name, form) for name, form in forms.items() if form is not None}

        def total(window: int) -> float:
            expected = self._expected[window]
            loss = np.exp(expected) * (expected - self._predict(self._feeds[window], rounded))
            return float(loss.sum(dtype=np.float64))

        totals = on_all_cores(total, range(len(self._feeds)))
        return max(0.0, sum(totals) / sum(map(len, self._expected)))

    def wide(self, name: str) -> BlockFormat:
        """Return the format of a weight in 8 bits."""
        form = self.forms[name]
        return form.wide().fitted(self._weights[name].shape[self._axes[name]]) or form.wide()

    def error(self, name: str, form: BlockFormat) -> float:
        """Return the squared error of a weight rounded to ``form``."""
        return float(np.square(self._rounded(name, form) - self._weights[name]).sum(dtype=np.float64))

    def _rounded(self, name: str, form: BlockFormat) -> Floats:
        matrix = self._weights[name]
        if self._axes[name] == 0:
            return dequantize(round_to_nearest(matrix, form), form)
        return np.ascontiguousarray(dequantize(round_to_nearest(matrix.T, form), form).T)

    def _predict(self, feed: Mapping[str, Array], rounded: Mapping[str, Floats]) -> Floats:
        """Return log-probabilities [tokens, vocabulary]."""
        logits = self._session.run([LOGITS], {**feed, **self._weights, **rounded})[0][0]
        if not np.isfinite(logits).all():
            raise GraphError("the model's logits hold NaN or infinity on the calibration text")
        logits -= logits.max(axis=1, keepdims=True)
        result: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return result
