"""Run a portable decoder package without changes in onnxruntime, OpenVINO and ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from carryall.graph_opt.graph.integer_sums import exact_sums

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
Run = Callable[[Feeds], list[Array]]  # outputs in the graph's order: logits, then the cache, layer by layer


def onnxruntime(model: Path) -> Run:
    """Plain onnxruntime on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    source, entries = exact_sums(model)
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, feeds))


def openvino(model: Path) -> Run:
    """OpenVINO's CPU plugin."""
    import openvino as ov

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
    compiled = ov.Core().compile_model(str(model), "CPU", settings)
    return lambda feeds: [np.array(value) for value in compiled(feeds).values()]


def reference(model: Path) -> Run:
    """ONNX's own reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(model))
    return lambda feeds: list(evaluator.run(None, feeds))


ENGINES: dict[str, Callable[[Path], Run]] = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "reference": reference,
}


class CachedDecoder:
    """Feeds tokens to a portable decoder and keeps its cache between calls."""

    def __init__(self, run: Run, model: Path, batch: int) -> None:
        self.run = run
        self.mask = np.zeros((batch, 0), np.int64)
        graph = onnx.load(str(model), load_external_data=False).graph
        shapes = {
            value.name: [
                dim.dim_value if dim.HasField("dim_value") else 0 for dim in value.type.tensor_type.shape.dim
            ]
            for value in graph.input
            if value.name.startswith("past_")
        }
        self.past: Feeds = {name: np.zeros((batch, *shape[1:]), np.float32) for name, shape in shapes.items()}

    def __call__(self, input_ids: Array, attention_mask: Array) -> Array:
        """Logits [batch, sequence, vocab] of new tokens [batch, sequence]; a 0 in the mask marks padding."""
        self.mask = np.concatenate([self.mask, attention_mask], axis=1)
        positions = np.maximum(self.mask.cumsum(axis=1) - 1, 0)[:, -input_ids.shape[1] :]
        feeds = {"input_ids": input_ids, "attention_mask": self.mask, "position_ids": positions, **self.past}
        logits, *present = self.run(feeds)
        self.past = dict(zip(self.past, present, strict=True))
        return logits
