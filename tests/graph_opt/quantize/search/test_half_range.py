"""The largest values of a float graph on a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from carryall.errors import GraphError
from carryall.graph_opt.quantize.search.half_range import largest_magnitudes

_MASKED = """<ir_version: 10, opset_import: ["" : 21]>
masked (int64[batch, n] input_ids) => (float[batch, n, 4] logits) {
    hidden = Gather (table, input_ids)
    scores = Add (hidden, mask)
    logits = Softmax (scores)
}"""
WINDOWS = [np.arange(128, dtype=np.int64) % 8]


def masked(file: Path, hidden: float) -> Path:
    """Save a graph whose scores are -inf in one column, as traces mask positions."""
    model = onnx.parser.parse_model(_MASKED)
    weights = {"table": np.full((8, 4), hidden), "mask": np.array([0, 0, 0, -np.inf])}
    for name, weight in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(np.float32), name))
    onnx.save(model, file)
    return file


def test_infinite_scores_of_masked_positions_are_left_out(tmp_path: Path) -> None:
    found = largest_magnitudes(masked(tmp_path / "x.onnx", 3), WINDOWS, context_length=128)
    assert found == {"hidden": 3, "scores": 3, "logits": pytest.approx(1 / 3)}


def test_nan_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"hidden\.largest_magnitude holds NaN"):
        largest_magnitudes(masked(tmp_path / "x.onnx", np.nan), WINDOWS, context_length=128)
