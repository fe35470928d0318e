"""Run the graphs of encoder-decoders in three runtimes, at once or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]
RUNTIMES = ["onnxruntime", "reference", pytest.param("openvino", marks=pytest.mark.long)]


def opened(path: Path, runtime: str) -> Run:
    """Return a function that runs a graph; names of the outputs come from the file."""
    names = [value.name for value in onnx.load(path, load_external_data=False).graph.output]
    if runtime == "onnxruntime":
        session = onnxruntime.InferenceSession(path)
        return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))
    if runtime == "reference":
        evaluator = ReferenceEvaluator(onnx.load(path))
        return lambda feeds: dict(zip(names, evaluator.run(None, dict(feeds)), strict=True))
    openvino = pytest.importorskip("openvino")
    core = openvino.Core()
    model = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: {name: model(dict(feeds))[name] for name in names}


def first_feeds(path: Path, states: Array) -> dict[str, Array]:
    """Return the inputs of a first run that do not depend on its tokens."""
    feeds = {"encoder_hidden_states": states, "encoder_attention_mask": np.ones(states.shape[:2], np.int64)}
    for value in onnx.load(path, load_external_data=False).graph.input:
        if value.name.startswith("past_"):
            feeds[value.name] = np.zeros((len(states), 4, 0, 8), np.float32)
    return feeds


def with_tokens(feeds: Mapping[str, Array], ids: Array, past: int) -> dict[str, Array]:
    """Return the inputs of a run of tokens behind ``past`` others."""
    positions = np.tile(np.arange(past, past + ids.shape[1]), (len(ids), 1))
    mask = np.ones((len(ids), past + ids.shape[1]), np.int64)
    return {**feeds, "input_ids": ids, "position_ids": positions, "attention_mask": mask}


def next_feeds(feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of the next run: longer caches, and no rows of the encoder that are new."""
    caches = {
        name.replace("present", "past", 1): value for name, value in outputs.items() if name != "logits"
    }
    caches = {name.replace("past.", "past_key_values.", 1): value for name, value in caches.items()}
    return {**feeds, **caches, "encoder_hidden_states": feeds["encoder_hidden_states"][:, :0]}
