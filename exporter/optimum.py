"""Export by tracing with Optimum and torch, for families that the exporter does not support."""

from __future__ import annotations

import importlib
from pathlib import Path

import onnx_ir as ir

from ..errors import MissingExtraError, UnsupportedModelError
from ..graph_opt.graph.onnx_files import read_onnx


def trace(source: Path, folder: Path) -> ir.Model:
    """Trace a checkpoint with Optimum. The graph is not in canonical form.

    Args:
        source: a Hugging Face checkpoint folder.
        folder: the folder that Optimum writes to. The model reads its weights from it, so keep it.

    Raises:
        MissingExtraError: Optimum is not installed.
        UnsupportedModelError: Optimum cannot trace the model; the message holds Optimum's error.
    """
    try:
        exporter = importlib.import_module("optimum.exporters.onnx")
    except ImportError as error:
        raise MissingExtraError("export --via optimum", "optimum-onnx", "optimum") from error
    try:
        exporter.main_export(
            str(source), output=folder, task="text-generation-with-past", do_validation=False
        )
    except Exception as error:  # torch, transformers and Optimum raise errors of many types
        raise UnsupportedModelError(f"Optimum could not trace {source}: {error}") from error
    return read_onnx(folder / "model.onnx")
