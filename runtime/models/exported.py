"""Packages in the cache: exported checkpoints and GGUF files, and quantized copies of packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...exporter.gguf.file import GgufFile
from ...exporter.package import Package, fingerprint
from ...progress import Progress
from ...storage.cache import cache_key, cached_folder
from ...storage.remembered import remembered

if TYPE_CHECKING:
    from ...graph_opt.quantize.recipe import QuantizationRecipe


def exported_package(
    source: Path,
    quantize: str | None = None,
    progress: Progress | None = None,
    rope_scaling: str | None = None,
) -> Package:
    """Return the package of a checkpoint folder or GGUF file; export it unless that is cached.

    Args:
        source: the folder or file.
        quantize: the quantization method; None does not quantize.
        progress: called for every tensor written.
        rope_scaling: see ``export_package``.

    Raises:
        UsageError: it is to be quantized, and already is.
    """
    if quantize is not None and source.is_file():  # a GGUF file has no folder with a tokenizer
        from ...exporter.export import check_float

        check_float(source, GgufFile(source).quantization)  # its package is large
        package = exported_package(source, progress=progress, rope_scaling=rope_scaling)
        return quantized_package(package, quantize, progress)
    method, content = recipe_of(quantize), scaled_content(fingerprint(source), rope_scaling)

    def build(folder: Path) -> None:
        from .building import build_export

        out = folder / _package_name(source)
        build_export(source, out, method, content, progress, rope_scaling=rope_scaling)

    return _cached(source, content, method, build)


def scaled_content(content: str, rope_scaling: str | None) -> str:
    """Return the key of a content with another rope scaling."""
    return content if rope_scaling is None else f"{content} {rope_scaling}"


def quantized_package(package: Package, quantize: str, progress: Progress | None = None) -> Package:
    """Return a quantized copy of a package; quantize it unless that is cached.

    Raises:
        UsageError: the package is already quantized.
    """
    from ...exporter.export import check_float
    from ...graph_opt.quantize.recipe import QuantizationRecipe

    method = QuantizationRecipe(quantize)
    check_float(package.path, package.record.quantization)

    def build(folder: Path) -> None:
        from .building import build_quantized

        build_quantized(package, folder / package.path.name, method, progress)

    return _cached(package.path, package.content_hash, method, build)


def recipe_of(quantize: str | None) -> QuantizationRecipe | None:
    """Return the recipe of a quantization method; None for None.

    Raises:
        UsageError: there is no such method.
    """
    if quantize is None:
        return None
    from ...graph_opt.quantize.recipe import QuantizationRecipe

    return QuantizationRecipe(quantize)


def recipe_facts(quantize: str | None) -> dict[str, Any]:
    """Return the ``record`` of a method's recipe, and whether it ``needs_text``; from the cache if known.

    Recipes import the library of graphs, which the start of a prepared model does without.

    Raises:
        UsageError: there is no such method.
    """

    def compute() -> dict[str, Any]:
        recipe = recipe_of(quantize)
        if recipe is None:
            return {"record": None, "needs_text": False}
        return {"record": recipe.to_dict(), "needs_text": recipe.needs_text}

    return compute() if quantize is None else remembered(cache_key(recipe_of=quantize), compute)


def _cached(
    source: Path, content: str, method: QuantizationRecipe | None, build: Callable[[Path], None]
) -> Package:
    record = None if method is None else method.to_dict()
    key = cache_key(name=_package_name(source), content=content, quantization=record)
    about = {"model": str(source), "quantization": record and record["method"]}
    folder = cached_folder("packages", key, build, about) / _package_name(source)
    return Package.open(folder, read_graph=False)


def _package_name(source: Path) -> str:
    return source.stem if source.is_file() else source.name
