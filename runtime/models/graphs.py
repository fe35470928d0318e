"""Find and load the graph of a model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...exporter.config import context_lengths, read_config
from ...exporter.export import export_model
from ...exporter.facts import GraphFacts
from ...exporter.gguf.file import GGUF_SUFFIX
from ...exporter.package import MODEL_FILE, Package, fingerprint
from ...graph_opt.graph.load import load_model, read_model
from ...graph_opt.graph.saving import save_model
from .context import optional_config, stated_lengths
from .find import find_model, side_folder
from .float_model import FloatSource
from .model_source import gguf_in_place, locate_model


def load_graph(name: str) -> tuple[ir.Model, Package | None]:
    """Load the graph of MODEL with lazy weights; return it and the package, None if there is no package.

    Raises:
        ModelNotFoundError: there is no such model.
        GraphError: an ONNX file cannot be read, or is not a valid graph.
        PackageError: the package is damaged.
    """
    path = find_model(name)
    if path.suffix.lower() == GGUF_SUFFIX:
        return gguf_in_place(name, path).load(), None
    if path.is_file():
        return load_model(path), None
    if Package.is_package(path):
        package = Package.open(path)
        return load_model(package.model_path), package
    return export_model(path), None


def model_place(name: str) -> Path:
    """Return the folder or ONNX file that MODEL names; of a GGUF file, the folder of its configuration.

    Raises:
        ModelNotFoundError: there is no such model.
        CheckpointError: a GGUF file is damaged.
    """
    path = find_model(name)
    return gguf_in_place(name, path).folder if path.suffix.lower() == GGUF_SUFFIX else path


def stored_quantization(name: str) -> dict[str, Any] | None:
    """Return how the weights of a GGUF file are quantized; None for floats, and for other models."""
    path = find_model(name)
    return gguf_in_place(name, path).opened().quantization if path.suffix.lower() == GGUF_SUFFIX else None


def graph_file(name: str, scratch: Path) -> Path:
    """Return the ONNX file of MODEL; a checkpoint is exported into ``scratch``, which must not exist.

    Raises:
        ModelNotFoundError: there is no such model.
        GraphError: an ONNX file cannot be read, or is not a valid graph.
        PackageError: the package is damaged.
    """
    path = locate_model(name)
    if path.is_file():
        load_model(path)
        return path
    if Package.is_package(path):
        return Package.open(path).model_path
    scratch.mkdir()
    save_model(export_model(path), scratch / MODEL_FILE)
    return scratch / MODEL_FILE


def float_source(name: str, model: ir.Model) -> FloatSource:
    """Return what is known of MODEL, which must not be quantized."""
    path = locate_model(name)
    is_package = Package.is_package(path)

    def key() -> str:
        if path.is_dir():
            return Package.open(path).content_hash if is_package else fingerprint(path)
        stats = [(file.name, file.stat()) for file in sorted(path.parent.glob(f"{path.name}*"))]
        return f"{path.resolve()} {[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"

    return FloatSource(
        name=name,
        folder=side_folder(path),
        context_length=default_context_length(name, model),
        key=key,
        path=path if path.is_file() else Package.open(path).model_path if is_package else None,
    )


def default_context_length(name: str, model: ir.Model) -> int | None:
    """Return the default context length of a model; None if neither its graph nor its files state one."""
    path = locate_model(name)
    if Package.is_package(path):
        return Package.open(path).record.default_context_length
    found = stated_lengths(optional_config(side_folder(path)), GraphFacts.of(model))
    return None if found is None else found.default


def stated_context(*names: str) -> int | None:
    """Return the smallest context length that the files of several models state; None if none does.

    Args:
        names: packages, checkpoints, or ONNX files with a config.json in their folder.
    """
    lengths = []
    for name in names:
        path = locate_model(name)
        folder = side_folder(path)
        if Package.is_package(folder):
            lengths.append(Package.open(folder).record.default_context_length)
        elif path.is_dir():
            lengths.append(context_lengths(read_config(path))[1])
        else:
            known = stated_lengths(optional_config(folder), GraphFacts.of(read_model(path)))
            lengths += [] if known is None else [known.default]
    return min(lengths, default=None)
