"""Sessions of onnxruntime on the CPU that compute a graph as written, for comparisons and calibration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import GraphError, MissingExtraError
from ...storage.paths import check_utf8
from .edit import weight
from .exact_session import prepare_session
from .integer_sums import OPERATORS, exact_sums
from .integer_weights import prepare_sums
from .load import read_model
from .recurrent_states import use_microsoft_states

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_FP32_ACTIVATIONS = "session.qdq_matmulnbits_accuracy_level", "1"
_MANY = 1 << 24  # quantized weights, whose dequantization takes longer than the products of a short run


def open_session(model: Path, name: str | None = None, *, defaults: bool = False) -> Any:
    """Open an onnxruntime session on the CPU, by default one that computes the graph as written.

    onnxruntime's optimizations are off then, because some change results, and a reference must not share the
    faults of what is compared with it. They stay on for graphs whose integer sums are exact with them only,
    and for those with many quantized weights, which would otherwise be dequantized at every run.

    Args:
        model: the ONNX file.
        name: its name in messages; by default the path.
        defaults: open it with onnxruntime's default optimizations, also those that change results.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        GraphError: onnxruntime cannot run the graph on the CPU.
    """
    check_utf8(model)
    options = _options("comparing graphs")
    if defaults:
        source, entries = exact_sums(model)
        for entry in entries.items():
            options.add_session_config_entry(*entry)
    else:
        options.add_session_config_entry(*_FP32_ACTIVATIONS)
        if not _needs_optimizations(read_model(model)):
            options.graph_optimization_level = type(options.graph_optimization_level).ORT_DISABLE_ALL
        source = prepare_session(model, options)
    try:
        return _opened(source, options)
    except Exception as error:  # onnxruntime's error types are not importable by a stable name
        said = str(error).replace(str(model), name or str(model))
        advice = ""
        weights = read_model(model).graph.initializers.values()
        if "NOT_IMPLEMENTED" in said and any(value.dtype in _HALF for value in weights):
            advice = "; it lacks kernels for 16-bit floats, so give a graph whose weights are float32"
        raise GraphError(f"onnxruntime's CPU provider cannot run {name or model}: {said}{advice}") from error


def open_part(model: ir.Model, folder: Path | None = None, *, threads: int = 0) -> Any:
    """Open a session on the CPU that computes values of a float graph, or of a part of it, for calibration.

    Args:
        model: the graph, which may be changed; its results are not.
        folder: where its external weights are; they are mapped, not copied.
        threads: of a run; 0 takes all cores.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    options = _options("calibration")
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # NumPy computes between runs
    options.add_session_config_entry(*_FP32_ACTIVATIONS)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    # The standard's operators with states have no kernels but bodies, which a part without types lacks.
    use_microsoft_states(model.graph)
    for entry in prepare_sums(model).items():
        options.add_session_config_entry(*entry)
    return _opened(ir.to_proto(model).SerializeToString(), options)


def _options(purpose: str) -> Any:
    """Return ``onnxruntime.SessionOptions`` without messages, since errors are raised too.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(purpose, "onnxruntime", "cpu") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def _opened(source: str | bytes, options: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _needs_optimizations(model: ir.Model) -> bool:
    nodes = list(model.graph.all_nodes())
    if any(node.op_type not in _QDQ and any(part in node.op_type for part in OPERATORS) for node in nodes):
        return True
    weights = (weight(node.inputs[0]) for node in nodes if node.op_type == "DequantizeLinear")
    return sum(tensor.size for tensor in weights if tensor is not None) > _MANY


@contextmanager
def running(model: Path | str) -> Iterator[None]:
    """Convert errors of an onnxruntime run into GraphError."""
    try:
        yield
    except Exception as error:  # onnxruntime's error types are not importable by a stable name
        raise GraphError(f"onnxruntime cannot run {model}: {error}") from error
