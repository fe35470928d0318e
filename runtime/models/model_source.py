"""What a MODEL is: the demo, a package, a checkpoint folder, a hub id or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from ...errors import ModelNotFoundError, UsageError
from ...exporter.config import context_lengths, read_config
from ...exporter.demo import NAMES, demo_path
from ...exporter.export import export_package
from ...exporter.hub import download, is_hub_id
from ...exporter.package import Package, Progress, fingerprint, write_package
from ...graph_opt.graph.load import load_model
from ...graph_opt.passes.base import pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.methods import Quantization, quantization
from .cache import cache_key, cached_folder

_LOWERED_INPUTS = ("seqlens_k", "block_indices")


@dataclass(frozen=True)
class ModelFiles:
    """Where a runnable decoder lies.

    Args:
        name: as the user called it.
        folder: tokenizer and configuration.
        model_path: the ONNX file.
        content_key: changes whenever the model does.
        context_length: most tokens a sequence may have.
        default_context_length: the same where nobody asked for more.
    """

    name: str
    folder: Path
    model_path: Path
    content_key: str
    context_length: int
    default_context_length: int

    def load(self) -> ir.Model:
        """The graph, its weights mapped from disk on demand.

        Raises:
            GraphError: the file is no ONNX, or no valid graph.
        """
        return load_model(self.model_path)

    @cached_property
    def lowered(self) -> bool:
        """Whether the graph is written for some provider's cache already."""
        return any(value.name in _LOWERED_INPUTS for value in self.load().graph.inputs)


def resolve_model(
    model: str | Path, *, quantize: str | None = None, progress: Progress | None = None
) -> ModelFiles:
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
    method = None if quantize is None else quantization(quantize)
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

    Raises:
        ModelNotFoundError: there is nothing of that name.
        UsageError: it is of a kind that is not supported.
        MissingExtraError: it is a hub id, and huggingface_hub is not installed.
    """
    name, path = str(model), Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{name}: GGUF files are not supported yet; take the model's safetensors checkpoint")
    if path.is_dir() and not Package.is_package(path) and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} is neither a package nor a checkpoint: it has no config.json")
    if path.is_file() and path.suffix != ".onnx":
        raise ModelNotFoundError(f"{path} is no model: give a folder or an .onnx file")
    if path.exists():
        return path
    if name == "demo" or name in NAMES:
        return demo_path(NAMES[0] if name == "demo" else name)
    if is_hub_id(name):
        return download(name)
    raise ModelNotFoundError(
        f"no model '{name}'; give a package, a checkpoint folder, an .onnx file, a hub id or 'demo'"
    )


def _exported(source: Path, method: Quantization | None, progress: Progress | None) -> Package:
    """The package of a checkpoint folder, from the cache if it was exported before."""

    def build(folder: Path) -> None:
        export_package(
            source,
            folder / source.name,
            transform=None if method is None else lambda model: run(model, [method.quantizer()])[0],
            quantization=None if method is None else method.record(),
            passes=() if method is None else (pass_name(method.quantizer()),),
            progress=progress,
        )

    return _cached(source, fingerprint(source), method, build)


def _quantized(package: Package, method: Quantization, progress: Progress | None) -> Package:
    """A quantized copy of a package, from the cache if it was made before."""
    if package.record.quantization is not None:
        raise UsageError(f"{package.path} is quantized already: {package.record.quantization}")

    def build(folder: Path) -> None:
        quantizer = method.quantizer()
        write_package(
            run(load_model(package.model_path), [quantizer])[0],
            package.path,
            folder / package.path.name,
            quantization=method.record(),
            passes=(*package.record.passes, pass_name(quantizer)),
            progress=progress,
        )

    return _cached(package.path, package.content_hash, method, build)


def _cached(
    source: Path, content: str, method: Quantization | None, build: Callable[[Path], None]
) -> Package:
    record = None if method is None else method.record()
    key = cache_key(path=str(source.resolve()), content=content, quantization=record)
    return Package.open(cached_folder("packages", key, build) / source.name)


def _package_files(name: str, package: Package) -> ModelFiles:
    return ModelFiles(
        name=name,
        folder=package.path,
        model_path=package.model_path,
        content_key=package.content_hash,
        context_length=package.record.context_length,
        default_context_length=package.record.default_context_length,
    )


def _onnx_file(name: str, path: Path) -> ModelFiles:
    if not (path.parent / "config.json").is_file():
        raise UsageError(f"{path} has no config.json beside it, which says how long its context is")
    longest, default = context_lengths(read_config(path.parent))
    return ModelFiles(
        name=name,
        folder=path.parent,
        model_path=path,
        content_key=f"{path.resolve()} {fingerprint(path.parent)}",
        context_length=longest,
        default_context_length=default,
    )
