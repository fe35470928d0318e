"""Sessions of onnxruntime on the CPU that compute a graph as written, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import GraphError, MissingExtraError
from ...storage.paths import check_utf8
from .integer_sums import exact_sums
from .load import read_model

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def open_session(model: Path, name: str | None = None) -> Any:
    """Open an onnxruntime session on the CPU that computes the graph as written.

    onnxruntime's extended fusions are disabled, because some change results: that to SkipLayerNormalization
    ignores the axis (1.31). They stay enabled for graphs with quantized weights, which would otherwise be
    dequantized at every run, and for graphs whose integer sums are exact with them only.

    Args:
        model: the ONNX file.
        name: its name in messages; by default the path.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        GraphError: onnxruntime cannot run the graph on the CPU.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("comparing graphs", "onnxruntime", "cpu") from error
    check_utf8(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised too
    source, entries = exact_sums(model)
    quantized = any(node.op_type == "DequantizeLinear" for node in read_model(model).graph.all_nodes())
    if not (quantized or entries):
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # fp32 activations
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's error types are not importable by a stable name
        said = str(error).replace(str(model), name or str(model))
        advice = ""
        weights = read_model(model).graph.initializers.values()
        if "NOT_IMPLEMENTED" in said and any(value.dtype in _HALF for value in weights):
            advice = "; it lacks kernels for 16-bit floats, so give a graph whose weights are float32"
        raise GraphError(f"onnxruntime's CPU provider cannot run {name or model}: {said}{advice}") from error


@contextmanager
def running(model: Path | str) -> Iterator[None]:
    """Convert errors of an onnxruntime run into GraphError."""
    try:
        yield
    except Exception as error:  # onnxruntime's error types are not importable by a stable name
        raise GraphError(f"onnxruntime cannot run {model}: {error}") from error
