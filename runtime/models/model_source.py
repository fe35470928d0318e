"""Resolve MODEL to a runnable decoder on disk; checkpoints and GGUF files are exported into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import LOGITS_POSITIONS, SEQLENS_K
from ...errors import GraphError, PackageError, UnsupportedModelError, UsageError
from ...exporter.config import context_lengths, read_config
from ...exporter.encoders.export import is_encoder
from ...exporter.export import export_model, export_package
from ...exporter.gguf.file import GGUF_SUFFIX
from ...exporter.package import (
    COPIED_FILES,
    Package,
    external_tensors,
    fingerprint,
    write_package,
)
from ...exporter.signature import DecoderSignature
from ...graph_opt.graph.load import check_loaded, load_model, read_model
from ...graph_opt.passes.base import GraphPass, pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress
from ...storage.hashes import content_key
from ...storage.scratch import scratch_folder
from .cache import cache_key, cached_folder
from .context import ContextLengths, optional_config, stated_lengths
from .find import find_model, side_folder
from .float_model import FloatModel, FloatSource

_LOWERED_INPUTS = (SEQLENS_K, LOGITS_POSITIONS, "block_indices")


@dataclass(frozen=True)
class SourceModel:
    """A runnable decoder on disk. Each file is read once, when it is first needed.

    Args:
        name: the user's name of the model.
        folder: the folder of tokenizer and configuration.
        model_path: the ONNX file.
        package: the package, if the model is one.
    """

    name: str
    folder: Path
    model_path: Path
    package: Package | None = field(default=None, compare=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json, or the same facts of genai_config.json; empty if there is neither.

        Raises:
            CheckpointError: the file is damaged.
        """
        return optional_config(self.folder)

    @cached_property
    def context(self) -> ContextLengths | None:
        """The maximum number of tokens of a sequence; None if no file of the model states it.

        Raises:
            CheckpointError: config.json is damaged.
            GraphError: the file is not a valid ONNX graph.
        """
        if self.package is None:
            return stated_lengths(self.config, lambda: self.graph)
        record = self.package.record
        return ContextLengths(record.context_length, record.default_context_length)

    @cached_property
    def graph(self) -> ir.Model:
        """The graph with lazy weights. It is shared and must not be changed; see ``load``.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        model = read_model(self.model_path) if self.package is None else self.package.graph
        check_loaded(model, self.model_path)
        return model

    @cached_property
    def signature(self) -> DecoderSignature | None:
        """The sizes of the decoder; None if the graph is not a decoder."""
        try:
            return DecoderSignature.of(self.graph)
        except GraphError:
            return None

    @cached_property
    def lowered(self) -> bool:
        """Whether the graph was already lowered for a provider."""
        return any(value.name in _LOWERED_INPUTS for value in self.graph.graph.inputs)

    def load(self) -> ir.Model:
        """Load another copy of the graph, which passes may change.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        return load_model(self.model_path)

    @cached_property
    def graph_files(self) -> tuple[str, ...]:
        """The names of the files of graph and weights, in the folder of ``model_path``.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        if self.package is not None:
            return tuple(name for name in self.package.record.files if name not in COPIED_FILES)
        tensors = external_tensors(self.graph)
        return self.model_path.name, *sorted({str(tensor.location) for tensor in tensors})

    @cached_property
    def content_key(self) -> str:
        """A hash of the content of the graph and its weights.

        Raises:
            GraphError: a file cannot be read, or the graph is not valid.
        """
        return self._read_content_key()

    def _read_content_key(self) -> str:
        try:
            return content_key(self.model_path.parent, self.graph_files)
        except OSError as error:
            raise GraphError(f"{error.filename} cannot be read: {error.strerror}") from error

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check at the end of a block that no file of graph or weights was changed during it.

        Raises:
            PackageError: a file was changed.
        """
        before = self.content_key
        yield
        if self._read_content_key() != before:
            raise PackageError(f"{self.model_path} or its weights changed while they were read; try again")


def resolve_model(
    model: str | Path, *, quantize: str | None = None, progress: Progress | None = None
) -> SourceModel:
    """Find a model; export and quantize it into the cache if needed.

    Args:
        model: any form of MODEL, see ``docs/models.md``.
        quantize: the quantization method, such as ``int4``; None does not quantize.
        progress: called for every tensor written.

    Raises:
        ModelNotFoundError: there is no model of that name.
        UsageError: the model cannot be quantized, or its format is not supported.
        UnsupportedModelError: no exporter supports the model.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
        GraphError: the package's graph is not valid.
    """
    method = None if quantize is None else QuantizationRecipe(quantize)
    path = find_model(model)
    if path.suffix == ".onnx" and path.is_file():
        if method is not None:
            raise UsageError(f"{path} is an ONNX file; quantize it first: carryall quantize {path} OUT")
        return _onnx_file(str(model), path)
    if not Package.is_package(path):
        try:
            return _package_files(str(model), _exported(path, method, progress))
        except UnsupportedModelError:
            if path.is_dir():
                _refuse_encoder(path, str(optional_config(path).get("model_type")))
            raise
    package = Package.open(path)
    _refuse_encoder(path, package.record.model_type)
    return _package_files(str(model), package if method is None else _quantized(package, method, progress))


def _refuse_encoder(folder: Path, model_type: str) -> None:
    """Refuse a checkpoint or package of a text encoder where a language model is needed."""
    if is_encoder({"model_type": model_type}):
        raise UnsupportedModelError(
            f"{folder} is a text encoder, which generates no text; use carryall.TextEncoder or carryall "
            "serve, and optimize or quantize its model.onnx"
        )


def locate_model(model: str | Path) -> Path:
    """Return the folder or ONNX file that MODEL names. A GGUF file is exported into the cache.

    Raises:
        CheckpointError: the GGUF file is damaged.
        UnsupportedModelError: carryall cannot read what the GGUF file holds.
        ModelNotFoundError: and the others of ``find_model``.
    """
    path = find_model(model)
    return _exported(path, None, None).path if path.suffix.lower() == GGUF_SUFFIX else path


def _exported(source: Path, method: QuantizationRecipe | None, progress: Progress | None) -> Package:
    """Return the package of a checkpoint folder; export it unless that is cached."""
    if method is not None and source.is_file():  # a GGUF file has no folder with a tokenizer
        return _quantized(_exported(source, None, progress), method, progress)
    content = fingerprint(source)

    def build(folder: Path) -> None:
        length = None if method is None else context_lengths(read_config(source))[1]
        facts = FloatSource(name=str(source), folder=source, context_length=length, key=lambda: content)
        with _quantizing(method, facts, lambda: export_model(source), progress) as (passes, record):
            export_package(
                source,
                folder / _package_name(source),
                transform=lambda model: run(model, passes)[0],
                quantization=record,
                passes=tuple(map(pass_name, passes)),
                progress=progress,
            )

    return _cached(source, content, method, build)


def _quantized(package: Package, method: QuantizationRecipe, progress: Progress | None) -> Package:
    """Return a quantized copy of a package; quantize it unless that is cached."""
    if package.record.quantization is not None:
        raise UsageError(f"{package.path} is already quantized: {package.record.quantization}")

    facts = FloatSource(
        name=str(package.path),
        folder=package.path,
        context_length=package.record.default_context_length,
        key=lambda: package.content_hash,
        path=package.model_path,
    )

    def build(folder: Path) -> None:
        with _quantizing(method, facts, package.load, progress) as (passes, record):
            write_package(
                run(load_model(package.model_path), passes)[0],
                package.path,
                folder / package.path.name,
                quantization=record,
                passes=(*package.record.passes, *map(pass_name, passes)),
                progress=progress,
            )

    return _cached(package.path, package.content_hash, method, build)


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


def _cached(
    source: Path, content: str, method: QuantizationRecipe | None, build: Callable[[Path], None]
) -> Package:
    record = None if method is None else method.to_dict()
    key = cache_key(name=_package_name(source), content=content, quantization=record)
    about = {"model": str(source), "quantization": record and record["method"]}
    return Package.open(cached_folder("packages", key, build, about) / _package_name(source))


def _package_name(source: Path) -> str:
    return source.stem if source.is_file() else source.name


def _package_files(name: str, package: Package) -> SourceModel:
    return SourceModel(
        name=name,
        folder=package.path,
        model_path=package.model_path,
        package=package,
    )


def _onnx_file(name: str, path: Path) -> SourceModel:
    return SourceModel(name=name, folder=side_folder(path), model_path=path)
