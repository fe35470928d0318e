"""Build what loading keeps in the cache: packages and lowered graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import EXPLICIT_KV
from ...errors import UnsupportedAttentionError
from ...exporter.config import context_lengths, read_config
from ...exporter.export import check_float, export_model, export_package, opened
from ...exporter.package import MODEL_FILE, Package
from ...exporter.package_writing import write_package
from ...exporter.save import save_model
from ...graph_opt.graph.load import load_model
from ...graph_opt.passes.base import GraphPass, pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import exported_passes, portable_passes
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress
from ...providers.base import Provider, RunnerConfig
from ...storage.scratch import scratch_folder
from .float_model import FloatModel, FloatSource
from .model_source import SourceModel


def build_export(
    source: Path, out: Path, method: QuantizationRecipe | None, content: str, progress: Progress | None
) -> None:
    """Export a checkpoint folder or GGUF file into the folder ``out``; ``content`` is its fingerprint."""
    length = None if method is None else context_lengths(read_config(source))[1]
    facts = FloatSource(name=str(source), folder=source, context_length=length, key=lambda: content)
    with _quantizing(method, facts, lambda: export_model(source), progress) as (passes, record):
        export_package(
            source,
            out,
            transform=lambda model: run(model, passes)[0],
            quantization=record,
            passes=tuple(map(pass_name, passes)),
            progress=progress,
        )


def checkpoint_graph(
    source: Path,
    config: dict[str, Any],
    method: QuantizationRecipe | None,
    content: str,
    progress: Progress | None,
) -> ir.Model:
    """Return the graph of a checkpoint folder; its weights are read and quantized when they are written.

    Args:
        source: the folder.
        config: the content of its config.json; empty if it has none.
        method: a recipe that needs no text; None for the weights as they are.
        content: the folder's fingerprint.
        progress: called while a method measures the model.

    Raises:
        CheckpointError: the checkpoint is damaged.
        UnsupportedModelError: there is no exporter for it.
        UsageError: it is already quantized.
    """
    with opened(source, config) as (folder, tensors, stored):
        if method is not None:
            check_float(source, stored)
        model = export_model(folder, config, tensors)
        if method is None:
            return model
        length = context_lengths(config)[1]
        facts = FloatSource(name=str(source), folder=source, context_length=length, key=lambda: content)
        with _quantizing(method, facts, lambda: model, progress) as (passes, _):
            return run(model, passes)[0]


def build_quantized(
    package: Package, out: Path, method: QuantizationRecipe | None, progress: Progress | None
) -> None:
    """Write a quantized copy of a package into the folder ``out``."""
    facts = FloatSource(
        name=str(package.path),
        folder=package.path,
        context_length=package.record.default_context_length,
        key=lambda: package.content_hash,
        path=package.model_path,
    )
    with _quantizing(method, facts, package.load, progress) as (passes, record):
        write_package(
            run(load_model(package.model_path), passes)[0],
            package.path,
            out,
            quantization=record,
            passes=(*package.record.passes, *map(pass_name, passes)),
            progress=progress,
        )


@contextmanager
def _quantizing(
    method: QuantizationRecipe | None,
    source: FloatSource,
    load: Callable[[], ir.Model],
    progress: Progress | None,
) -> Iterator[tuple[list[GraphPass], dict[str, Any] | None]]:
    """Yield the passes of a recipe and their record; the measurements they read exist inside of the block."""
    if method is None:
        yield [], None
        return
    with scratch_folder() as scratch:
        yield method.passes(FloatModel(source, load(), None, scratch, progress=progress))


def build_lowered(
    files: SourceModel,
    folder: Path,
    provider: Provider,
    config: RunnerConfig,
    change: GraphPass | None,
    progress: Progress | None,
) -> None:
    """Lower a model for a provider into ``folder``, as ``model.onnx``.

    Args:
        files: the portable model.
        folder: an empty folder.
        provider: the provider to lower for.
        config: the options of the runner, with ``context_length`` set.
        change: a pass that changes the portable graph first.
        progress: called for every tensor written.
    """
    canonical = exported_passes() if files.canonical else portable_passes()
    first = [*canonical, *([change] if change is not None else [])]
    try:
        model, _ = run(files.load(), [*first, *provider.passes(config)])
    except UnsupportedAttentionError as error:
        explicit = provider.explicit_passes(config)
        if explicit is None:
            raise error.refusal() from error
        model, _ = run(files.load(), [*first, *explicit])
        model.metadata_props[EXPLICIT_KV] = str(error)
    save_model(model, folder / MODEL_FILE, progress)
