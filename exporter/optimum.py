"""The other way in: Optimum traces the checkpoint with torch, for families that have no exporter here."""

from __future__ import annotations

import importlib
from pathlib import Path

import onnx_ir as ir

from ..errors import MissingExtraError, UnsupportedModelError


def trace(source: Path, folder: Path) -> ir.Model:
    """Trace a checkpoint with Optimum; the graph is as traced, not canonical.

    Args:
        source: a Hugging Face checkpoint folder.
        folder: where Optimum writes; the weights are read from there as long as the model is used.

    Raises:
        MissingExtraError: Optimum is not installed.
        UnsupportedModelError: Optimum cannot trace the model; the message has its reason.
    """
    try:
        exporter = importlib.import_module("optimum.exporters.onnx")
    except ImportError as error:
        raise MissingExtraError("export --via optimum", "optimum-onnx", "optimum") from error
    try:
        exporter.main_export(
            str(source), output=folder, task="text-generation-with-past", do_validation=False
        )
    except Exception as error:  # whatever torch, transformers and Optimum raise
        raise UnsupportedModelError(f"Optimum could not trace {source}: {error}") from error
    return ir.load(folder / "model.onnx")
