"""Find and load the graph of a model by its name."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ...contract import CONTEXT_LENGTH
from ...exporter.config import context_lengths, read_config, read_json
from ...exporter.export import export_model
from ...exporter.package import DATA_FILE, MODEL_FILE, Package
from ...graph_opt.graph.load import load_model
from .model_source import locate_model

CONFIG_FILE = "config.json"


def load_graph(name: str) -> tuple[ir.Model, Package | None]:
    """Load the graph of MODEL with lazy weights; return it and the package, None if there is no package.

    Raises:
        ModelNotFoundError: there is no such model.
        GraphError: an ONNX file cannot be read, or is not a valid graph.
        PackageError: the package is damaged.
    """
    path = locate_model(name)
    if path.is_file():
        return load_model(path), None
    if Package.is_package(path):
        package = Package.open(path)
        return load_model(package.model_path), package
    return export_model(path), None


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
    ir.save(export_model(path), scratch / MODEL_FILE, external_data=DATA_FILE)
    return scratch / MODEL_FILE


def default_context_length(name: str, model: ir.Model) -> int | None:
    """Return the default context length of a model; None if neither its graph nor its files state one."""
    path = locate_model(name)
    if Package.is_package(path):
        return Package.open(path).record.default_context_length
    if path.is_dir():
        return context_lengths(read_config(path))[1]
    stated = model.metadata_props.get(CONTEXT_LENGTH)
    if stated is not None:
        return int(stated)
    beside = path.parent / CONFIG_FILE
    return context_lengths(read_config(path.parent))[1] if beside.is_file() else None


def stated_context(*names: str) -> int | None:
    """Return the smallest context length that the files of several models state; None if none does.

    Args:
        names: packages, checkpoints, or ONNX files with a config.json in their folder.
    """
    found = []
    for name in names:
        path = locate_model(name)
        folder = path if path.is_dir() else path.parent
        if Package.is_package(folder):
            found.append(Package.open(folder).record.default_context_length)
        elif (folder / CONFIG_FILE).is_file():
            raw = read_json(folder / CONFIG_FILE)
            if {"max_position_embeddings", "n_positions"} & set(raw.get("text_config", raw)):
                found.append(context_lengths(raw)[1])
    return min(found, default=None)
