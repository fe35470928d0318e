"""Build packages, exported and quantized ones, for the user or for the cache."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...exporter.config import context_lengths, read_config
from ...exporter.draft_heads import draft_head_model
from ...exporter.drafters.drafter import Drafter
from ...exporter.export import Build, ExportedGraph, check_float, export_model, export_package, opened
from ...exporter.package import Package
from ...exporter.safetensors_files import safetensors_of
from ...graph_opt.graph.load import load_model
from ...graph_opt.passes.base import pass_name
from ...graph_opt.quantize.left_float import LeftFloat
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress, phase
from ...storage.scratch import scratch_folder
from .float_model import FloatSource
from .quantized_graph import float_model, quantize_graph
from .write_graph import write_graph


def build_export(
    source: Path,
    out: Path,
    recipe: QuantizationRecipe | None,
    content: str,
    progress: Progress | None,
    build: Build | None = None,
    *,
    text_only: bool = False,
    rope_scaling: str | None = None,
) -> tuple[Package, ExportedGraph, LeftFloat | None]:
    """Export a checkpoint folder or GGUF file into the folder ``out``, and quantize it by a recipe.

    Args:
        source: what to export.
        out: a new or empty folder.
        recipe: how to quantize; None does not.
        content: a text that changes whenever the source does.
        progress: called for every tensor, in the phases ``calibrate``, ``measure`` and ``export``.
        build: see ``export_package``.
        text_only: leave out what a model sees pictures with.
        rope_scaling: see ``export_package``.

    Returns:
        The package, its graph, and what stayed float; None if nothing was quantized.

    Raises:
        UsageError: the source is quantized already, or the recipe does not fit it.
        Exception: those of ``export_package``.
    """
    exported: list[tuple[ExportedGraph, LeftFloat | None]] = []

    def change(graph: ExportedGraph) -> ExportedGraph:
        left = None
        if recipe is not None:
            graph, left = _quantized(graph, source, recipe, content, scratch, measuring, progress, keeps=True)
        exported.append((graph, left))
        return graph

    with scratch_folder() as scratch, ExitStack() as measuring:
        package = export_package(
            source,
            out,
            build=build,
            change=change,
            content=content,
            progress=phase(progress, "export"),
            text_only=text_only,
            rope_scaling=rope_scaling,
        )
    return package, *exported[-1]


def _quantized(
    graph: ExportedGraph,
    source: Path,
    recipe: QuantizationRecipe,
    content: str,
    scratch: Path,
    measuring: ExitStack,
    progress: Progress | None,
    *,
    keeps: bool = False,
) -> tuple[ExportedGraph, LeftFloat]:
    """Quantize the graph of a checkpoint; return it with its record, and what stayed float.

    It can be written until ``measuring`` ends; with ``keeps``, see ``FloatModel``, it is.
    """
    check_float(source, graph.quantization)
    length = context_lengths(read_config(graph.folder))[1]
    facts = FloatSource(name=str(source), folder=graph.folder, context_length=length, key=lambda: content)
    measured = measuring.enter_context(
        float_model(facts, graph.model, recipe, scratch, progress, keeps=keeps)
    )
    done = quantize_graph(graph.model, measured, recipe)
    passes = (*graph.passes, *map(pass_name, done.passes))
    head = None if graph.head is None else quantized_head(graph.head, recipe, graph.folder)
    changed = replace(graph, model=done.model, quantization=done.record, passes=passes, head=head)
    return changed, done.left


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
    with (
        opened(source, config) as (folder, tensors, stored),
        scratch_folder() as scratch,
        ExitStack() as measuring,
    ):
        graph = ExportedGraph(export_model(folder, config, tensors), folder, stored)
        if method is not None:
            graph, _ = _quantized(graph, source, method, content, scratch, measuring, progress)
        return graph.model


def draft_head_graph(
    source: Path, config: dict[str, Any], method: str | None, head: Path | None = None
) -> ir.Model | None:
    """Return the graph of the draft head of a checkpoint folder; None if it has none.

    Args:
        source: the folder.
        config: the content of its config.json.
        method: the quantization of the model; the head is quantized alike, without a text.
        head: a folder with the head's tensors, if they are not among the checkpoint's.
    """
    with opened(source, config) as (folder, tensors, _):
        model = draft_head_model(folder, config, tensors, head)
        if model is None or method is None:
            return model
        return quantized_head(model, QuantizationRecipe(method), folder)


def drafter_graph(source: Path, config: dict[str, Any], method: str | None, drafter: Drafter) -> ir.Model:
    """Return the graph of a drafter for a checkpoint folder; ``method`` is as for ``draft_head_graph``."""
    with opened(source, config) as (folder, tensors, _):
        model = drafter.model(config, safetensors_of(folder) if tensors is None else tensors)
        return model if method is None else quantized_head(model, QuantizationRecipe(method), folder)


def quantized_head(model: ir.Model, recipe: QuantizationRecipe, folder: Path) -> ir.Model:
    """Quantize the graph of a draft head as its model is, but by rounding: a proposal need not be exact."""
    fast = QuantizationRecipe(f"{recipe.method}-fast") if recipe.needs_text else recipe
    facts = FloatSource(name="draft head", folder=folder, context_length=None, key=lambda: "")
    with scratch_folder() as scratch, float_model(facts, model, fast, scratch, None) as measured:
        return quantize_graph(model, measured, fast).model


def build_quantized(
    package: Package, out: Path, recipe: QuantizationRecipe, progress: Progress | None
) -> None:
    """Write a quantized copy of a package into the folder ``out``."""
    facts = FloatSource(
        name=str(package.path),
        folder=package.path,
        context_length=package.record.default_context_length,
        key=lambda: package.content_hash,
        path=package.model_path,
    )
    model = load_model(package.model_path)
    with (
        scratch_folder() as scratch,
        float_model(facts, model, recipe, scratch, progress, keeps=True) as measured,
    ):
        done = quantize_graph(model, measured, recipe)
        names = tuple(map(pass_name, done.passes))
        write_graph(
            done.model,
            package.path,
            out,
            passes=names,
            quantization=done.record,
            change_head=lambda head: quantized_head(head, recipe, package.path),
            progress=progress,
        )
