"""What a MODEL is: the demo, a package, a checkpoint folder, a hub id or an ONNX file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...contract import SEQLENS_K
from ...errors import CarryallWarning, GraphError, ModelNotFoundError, PackageError, UsageError
from ...exporter.config import context_lengths, read_config
from ...exporter.demo import NAMES, demo_path
from ...exporter.export import export_package
from ...exporter.hub import download, is_hub_id
from ...exporter.package import (
    COPIED_FILES,
    MODEL_FILE,
    Package,
    external_tensors,
    fingerprint,
    write_package,
)
from ...exporter.signature import DecoderSignature
from ...graph_opt.graph.load import check_loaded, load_model, read_model
from ...graph_opt.passes.base import pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress
from ...storage.hashes import content_key
from ...storage.paths import check_name
from .cache import cache_key, cached_folder

_LOWERED_INPUTS = (SEQLENS_K, "block_indices")
_EMBEDDED = {"demo": NAMES[0], **{name: name for name in NAMES}}


@dataclass(frozen=True)
class SourceModel:
    """A runnable decoder on disk. What is read of it is read once, when it is first asked for.

    Args:
        name: as the user called it.
        folder: tokenizer and configuration.
        model_path: the ONNX file.
        package: where the files are one.
    """

    name: str
    folder: Path
    model_path: Path
    package: Package | None = field(default=None, compare=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json.

        Raises:
            ModelNotFoundError: there is none.
            CheckpointError: it is damaged.
        """
        return read_config(self.folder)

    @cached_property
    def _context_lengths(self) -> tuple[int, int]:
        if self.package is None:
            return context_lengths(self.config)
        return self.package.record.context_length, self.package.record.default_context_length

    @property
    def context_length(self) -> int:
        """Most tokens a sequence may have."""
        return self._context_lengths[0]

    @property
    def default_context_length(self) -> int:
        """The same where nobody asked for more."""
        return self._context_lengths[1]

    @cached_property
    def graph(self) -> ir.Model:
        """The graph, its weights mapped from disk on demand: to look at, never to change.

        Raises:
            GraphError: the file is no ONNX, or no valid graph.
        """
        model = read_model(self.model_path) if self.package is None else self.package.graph
        check_loaded(model, self.model_path)
        return model

    @cached_property
    def signature(self) -> DecoderSignature | None:
        """The sizes that the graph states; None where it is no decoder."""
        try:
            return DecoderSignature.of(self.graph)
        except GraphError:
            return None

    @cached_property
    def lowered(self) -> bool:
        """Whether the graph is written for some provider's cache already."""
        return any(value.name in _LOWERED_INPUTS for value in self.graph.graph.inputs)

    def load(self) -> ir.Model:
        """The graph once more, for passes that change it.

        Raises:
            GraphError: the file is no ONNX, or no valid graph.
        """
        return load_model(self.model_path)

    @cached_property
    def graph_files(self) -> tuple[str, ...]:
        """The graph and its weights, all in the folder of ``model_path``.

        Raises:
            GraphError: the file is no ONNX, or no valid graph.
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
        """Refuse a result that was made from these files while another process wrote to them.

        Raises:
            PackageError: at the end, if a file that the graph lies in is another one now.
        """
        before = self.content_key
        yield
        if self._read_content_key() != before:
            raise PackageError(f"{self.model_path} or its weights changed while they were read; try again")


def resolve_model(
    model: str | Path, *, quantize: str | None = None, progress: Progress | None = None
) -> SourceModel:
    """Find a model, and export and quantize it into the cache where that is needed.

    Args:
        model: ``demo``, a package, a Hugging Face folder or hub id, or an ONNX file beside its tokenizer.
        quantize: how to quantize the weights first, such as ``int4``; None takes them as they are.
        progress: told about every tensor written.

    Raises:
        ModelNotFoundError: there is nothing of that name.
        UsageError: it cannot be quantized, or is of a kind that is not supported.
        UnsupportedModelError: no exporter knows the model.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
        GraphError: the package's graph is not valid.
    """
    method = None if quantize is None else QuantizationRecipe(quantize)
    path = locate_model(model)
    if path.is_file():
        if method is not None:
            raise UsageError(f"{path} is an ONNX file; quantize it first: carryall quantize {path} OUT")
        return _onnx_file(str(model), path)
    if not Package.is_package(path):
        return _package_files(str(model), _exported(path, method, progress))
    package = Package.open(path)
    return _package_files(str(model), package if method is None else _quantized(package, method, progress))


def locate_model(model: str | Path) -> Path:
    """The folder or ONNX file that MODEL names, fetched if it is a hub id.

    Names of embedded models (``demo``) always mean these, whatever the working folder holds; ``./demo`` is a
    folder. Of other names, a file or folder goes before a hub id.

    Raises:
        ModelNotFoundError: there is nothing of that name.
        UsageError: it is of a kind that is not supported.
        MissingExtraError: it is a hub id, and huggingface_hub is not installed.
    """
    name, path = str(model), Path(model).expanduser()
    check_name(path)
    if isinstance(model, str) and name in _EMBEDDED:
        if path.exists():
            text = f"'{name}' is the embedded model; write ./{name} for the folder"
            warnings.warn(text, CarryallWarning, stacklevel=2)
        return demo_path(_EMBEDDED[name])
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{name}: GGUF files are not supported yet; take the model's safetensors checkpoint")
    if path.is_dir() and not Package.is_package(path) and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} is neither a package nor a checkpoint: it has no config.json")
    if path.is_file() and path.suffix != ".onnx":
        raise ModelNotFoundError(f"{path} is no model: give a folder or an .onnx file")
    if path.is_dir() and is_traced_folder(path):
        return path / MODEL_FILE
    if path.exists():
        return path
    if isinstance(model, Path) or _looks_like_path(name):
        raise ModelNotFoundError(f"there is no file or folder {name}")
    if is_hub_id(name):
        return download(name)
    raise ModelNotFoundError(
        f"no model '{name}'; give a package, a checkpoint folder, an .onnx file, a hub id or 'demo'"
    )


def _looks_like_path(name: str) -> bool:
    """Whether a name can be nothing but a path; ``org/name`` may be one or a hub id."""
    return name.startswith((".", "~", "/")) or "\\" in name or ("/" in name and not is_hub_id(name))


def is_traced_folder(path: Path) -> bool:
    """Whether a folder holds a traced model beside its configuration, as Optimum writes it."""
    return (
        (path / MODEL_FILE).is_file()
        and not Package.is_package(path)
        and next(path.glob("*.safetensors"), None) is None
    )


def _exported(source: Path, method: QuantizationRecipe | None, progress: Progress | None) -> Package:
    """The package of a checkpoint folder, from the cache if it was exported before."""

    def build(folder: Path) -> None:
        passes, record = ([], None) if method is None else method.passes()
        export_package(
            source,
            folder / source.name,
            transform=lambda model: run(model, passes)[0],
            quantization=record,
            passes=tuple(map(pass_name, passes)),
            progress=progress,
        )

    return _cached(source, fingerprint(source), method, build)


def _quantized(package: Package, method: QuantizationRecipe, progress: Progress | None) -> Package:
    """A quantized copy of a package, from the cache if it was made before."""
    if package.record.quantization is not None:
        raise UsageError(f"{package.path} is quantized already: {package.record.quantization}")

    def build(folder: Path) -> None:
        passes, record = method.passes()
        write_package(
            run(load_model(package.model_path), passes)[0],
            package.path,
            folder / package.path.name,
            quantization=record,
            passes=(*package.record.passes, *map(pass_name, passes)),
            progress=progress,
        )

    return _cached(package.path, package.content_hash, method, build)


def _cached(
    source: Path, content: str, method: QuantizationRecipe | None, build: Callable[[Path], None]
) -> Package:
    record = None if method is None else method.to_dict()
    key = cache_key(name=source.name, content=content, quantization=record)
    about = {"model": str(source), "quantization": record and record["method"]}
    return Package.open(cached_folder("packages", key, build, about) / source.name)


def _package_files(name: str, package: Package) -> SourceModel:
    return SourceModel(
        name=name,
        folder=package.path,
        model_path=package.model_path,
        package=package,
    )


def _onnx_file(name: str, path: Path) -> SourceModel:
    if not (path.parent / "config.json").is_file():
        raise UsageError(f"{path} has no config.json beside it, which says how long its context is")
    return SourceModel(
        name=name,
        folder=path.parent,
        model_path=path,
    )
