"""ONNX's backend node tests."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner


@functools.cache
def node_tests() -> dict[str, Any]:
    """Return all node tests by name; onnx computes the expected results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in load_model_tests(kind="node")}


def passes(case: Any, model: onnx.ModelProto) -> bool:
    """Return whether onnxruntime gives the expected results of a test."""
    try:
        for inputs, expected in case.data_sets:
            Runner.assert_similar_outputs(expected, _run(model, inputs), rtol=case.rtol, atol=case.atol)
    except Exception:  # noqa: BLE001 -- operators without a kernel fail in as many ways
        return False
    return True


def _run(model: onnx.ModelProto, inputs: Sequence[Any]) -> Sequence[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    feed = {
        name: np.asarray(value) if np.isscalar(value) else value
        for name, value in zip(names, inputs, strict=False)
    }
    results: Sequence[Any] = session.run(None, feed)
    return results
