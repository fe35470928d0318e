"""Export a text encoder: the part of ``carryall.export`` for models that generate no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...contract import CONTEXT_LENGTH
from ...errors import UsageError
from ...exporter.config import LENGTH_KEYS
from ...exporter.encoders.export import export_encoder
from ...exporter.encoders.modules import side_files
from ...exporter.export import ExportedGraph, sight
from ...exporter.package import Package, fingerprint
from ...exporter.package_writing import check_paths, check_tokenizer, write_package
from ...graph_opt.passes.base import pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.left_float import LeftFloat, float_matrices, left_float
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress, phase


def check_encoder_options(model_type: str, options: Mapping[str, bool]) -> None:
    """Refuse options that only decoders have.

    Args:
        model_type: of the encoder.
        options: by option, whether it was given.

    Raises:
        UsageError: one was given.
    """
    found = [name for name, was_given in options.items() if was_given]
    if found:
        raise UsageError(
            f"'{model_type}' is a text encoder, for which export has no {found[0]}; it has quantize"
        )


_FAST = {"int4": "int4-fast", "int8": "int8-fast"}
_BYTES_BLOCK = 128  # inputs with one scale; on AVX2 blocks of 32 take 1.3 times as long


def encoder_recipe(recipe: QuantizationRecipe) -> QuantizationRecipe:
    """Return how an encoder is quantized by a recipe.

    Measurements on a text are those of decoders, so int4 and int8 are int4-fast and int8-fast. Blocks of 8
    bits have 128 inputs unless the recipe says otherwise.

    Raises:
        UsageError: the recipe reads a text, or its method is none of weights alone.
    """
    method = _FAST.get(recipe.method, recipe.method)
    try:
        changed = replace(recipe, method=method)
    except UsageError as error:
        raise UsageError(f"a text encoder is quantized by {method}: {error}") from error
    if method not in _FAST.values() or changed.needs_text:
        raise UsageError(
            f"a text encoder is quantized by {', '.join(_FAST)} or {', '.join(_FAST.values())}, without a "
            f"calibration "
            "text"
        )
    if method == "int8-fast" and changed.block_size is None:
        changed = replace(changed, block_size=_BYTES_BLOCK)
    return changed


def export_encoder_package(
    folder: Path,
    out: Path,
    options: Mapping[str, bool],
    progress: Progress | None,
    recipe: QuantizationRecipe | None = None,
    *,
    text_only: bool = False,
) -> tuple[Package, ExportedGraph, LeftFloat | None]:
    """Write the package of an encoder.

    Args:
        folder: its checkpoint.
        out: the package, a new folder.
        options: see ``check_encoder_options``.
        progress: called for every tensor, in bytes.
        recipe: how to quantize; None does not.
        text_only: leave out what it sees pictures with.

    Returns:
        The package, its graph, and what stayed float; None if nothing was quantized.

    Raises:
        UsageError: an option is given that only decoders have, or the recipe needs a decoder.
        UnsupportedModelError: see ``export_encoder``.
        CheckpointError: see ``export_encoder``.
        OSError: a file cannot be written.
    """
    config = check_paths(folder, out)  # before any work
    check_tokenizer(folder)
    check_encoder_options(config["model_type"], options)
    others, tower = side_files(folder), None if text_only else sight(folder, config)
    graph, left = ExportedGraph(export_encoder(folder, config), folder), None
    if recipe is not None:
        graph, left = _quantized(graph, encoder_recipe(recipe))
    model = graph.model
    length = {LENGTH_KEYS[0]: int(model.metadata_props[CONTEXT_LENGTH])}
    package = write_package(
        model,
        folder,
        out,
        content=fingerprint(folder),
        config={**config, **length},
        quantization=graph.quantization,
        passes=graph.passes,
        others=others,
        sight=tower,
        progress=phase(progress, "export"),
    )
    return package, graph, left


def _quantized(graph: ExportedGraph, recipe: QuantizationRecipe) -> tuple[ExportedGraph, LeftFloat]:
    matrices = float_matrices(graph.model)
    passes, record = recipe.passes()
    model, report = run(graph.model, passes)
    left = left_float(matrices, model, [refusal for _, refusal in report.refusals])
    return replace(graph, model=model, quantization=record, passes=tuple(map(pass_name, passes))), left
