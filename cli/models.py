"""What a MODEL on the command line means where a graph is wanted."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ..exporter.demo import NAMES, demo_path
from ..exporter.export import export_model
from ..exporter.package import Package
from ..runtime.errors import GraphError, ModelNotFoundError


def model_path(name: str) -> Path:
    """Return the file or folder that MODEL names.

    Raises:
        ModelNotFoundError: it names none.
    """
    path = Path(name)
    if path.exists():
        return path
    if name == "demo" or name in NAMES:
        return demo_path("pycoder" if name == "demo" else name)
    raise ModelNotFoundError(
        f"no model '{name}'; give a package, a checkpoint folder, an ONNX file, or 'demo'"
    )


def load_graph(name: str) -> tuple[ir.Model, Package | None]:
    """Load the graph of MODEL, its weights lazily; and the package, if it is one.

    Raises:
        ModelNotFoundError: no such model.
        GraphError: an ONNX file cannot be read.
    """
    path = model_path(name)
    if path.is_file():
        return load_onnx(path), None
    if Package.is_package(path):
        package = Package.open(path)
        return package.load(), package
    return export_model(path), None


def load_onnx(path: Path) -> ir.Model:
    """Load an ONNX file, its external weights lazily."""
    try:
        return ir.load(path)
    except Exception as error:  # protobuf raises many kinds for a file that is no ONNX
        raise GraphError(f"{path} is no readable ONNX file: {error}") from error
