"""Run a portable graph without lowering behind the runner interface that the evaluator uses.

ONNX files run in onnxruntime, OpenVINO files in OpenVINO. Both compute everything that is not quantized in
fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from carryall.graph_opt.graph.session import open_session
from carryall.providers.base import Row, RunnerInfo

_PAST = "past_key_values."
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": bfloat16}


class PortableModel:
    """Run one sequence at a time; the KV outputs of a run are the inputs of the next.

    Args:
        path: ``model.onnx`` or ``model.xml``.
        info: runner info of the float model.
    """

    def __init__(self, path: Path, info: RunnerInfo) -> None:
        self.info = info
        self._model: _OnnxRuntime | _OpenVINO = (
            _OpenVINO(path) if path.suffix == ".xml" else _OnnxRuntime(path)
        )
        self._past = self._model.empty

    def forward(self, rows: Sequence[Row]) -> list[Any]:
        """Return logits [num_logits, vocabulary] of the only row."""
        (row,) = rows
        past = self._past if row.start else self._model.empty
        total = row.start + len(row.tokens)
        feed = {
            "input_ids": np.asarray(row.tokens, np.int64)[None],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(row.start, total)[None],
        }
        results = self._model.run(feed | past)
        self._past = {name: results[name.replace("past_key_values", "present")] for name in past}
        return [results["logits"][0][len(row.tokens) - row.num_logits :]]


class _OnnxRuntime:
    def __init__(self, path: Path) -> None:
        self._session = open_session(path)
        self._names = [value.name for value in self._session.get_outputs()]
        self.empty = {
            value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), _TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name.startswith(_PAST)
        }

    def run(self, feed: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, self._session.run(None, feed), strict=True))


class _OpenVINO:
    def __init__(self, path: Path) -> None:
        import openvino

        exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        self._compiled = openvino.Core().compile_model(path, "CPU", exact)
        shapes = {value.any_name: value.partial_shape for value in self._compiled.inputs}
        self.empty = {
            name: np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32)
            for name, shape in shapes.items()
            if name.startswith(_PAST)
        }

    def run(self, feed: dict[str, Any]) -> dict[str, Any]:
        results = self._compiled(feed)
        return {output.any_name: results[output].copy() for output in self._compiled.outputs}
