"""Sessions of onnxruntime that compute values of a float graph, or of a part of it, on calibration text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from ....errors import MissingExtraError
from ...graph.integer_weights import prepare_sums
from ...graph.recurrent_states import use_microsoft_states


def open_session(model: ir.Model, folder: Path | None = None) -> Any:
    """Return an onnxruntime CPU session of a graph; the graph may be changed, its results are not.

    Args:
        model: the graph, whole or a part.
        folder: where its external weights are; they are mapped, not copied.

    Raises:
        MissingExtraError: onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("calibration", "onnxruntime", "cpu") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # NumPy computes between runs
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # fp32 activations
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    # The standard's operators with states have no kernels but bodies, which a part without types lacks.
    use_microsoft_states(model.graph)
    for entry in prepare_sums(model).items():
        options.add_session_config_entry(*entry)
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
