"""What a MODEL is: the demo, a package, a checkpoint folder, a hub id or an ONNX file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..exporter.config import context_lengths, read_config
from ..exporter.demo import NAMES, demo_path
from ..exporter.export import export_package
from ..exporter.package import Package, Progress, fingerprint, write_package
from ..graph_opt.passes.base import pass_name
from ..graph_opt.pipeline import run
from ..graph_opt.quantize.blockwise import BlockFormat
from ..graph_opt.quantize.weight_only import WeightOnlyQuantizationPass
from .cache import cache_key, cached_folder
from .errors import GraphError, ModelNotFoundError, UsageError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_LOWERED_INPUT = "seqlens_k"

_FORMATS = {
    "int4": BlockFormat(bits=4, block_size=128),
    "int8": BlockFormat(bits=8, block_size=128),
}


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
            GraphError: the file is no ONNX.
        """
        try:
            return ir.load(self.model_path)
        except Exception as error:  # protobuf and onnx_ir raise many kinds for a damaged file
            raise GraphError(f"{self.model_path} is no readable ONNX file: {error}") from error

    @cached_property
    def lowered(self) -> bool:
        """Whether the graph is written for a slot provider already."""
        return any(value.name == _LOWERED_INPUT for value in self.load().graph.inputs)


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
    """
    if quantize is not None and quantize not in _FORMATS:
        raise UsageError(f"unknown quantization '{quantize}'; known: {', '.join(_FORMATS)}")
    path = _locate(str(model), progress)
    if path.is_file():
        if quantize is not None:
            raise UsageError(f"{path} is an ONNX file; quantize it first: carryall quantize {path} OUT")
        return _onnx_file(str(model), path)
    if Package.is_package(path):
        package = Package.open(path)
        return _package_files(
            str(model), package if quantize is None else _quantized(package, quantize, progress)
        )
    return _package_files(str(model), _exported(path, quantize, progress))


def _locate(name: str, progress: Progress | None) -> Path:
    path = Path(name).expanduser()
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
    if _HUB_ID.fullmatch(name):
        return _download(name)
    raise ModelNotFoundError(
        f"no model '{name}'; give a package, a checkpoint folder, an .onnx file, a hub id or 'demo'"
    )


def _download(hub_id: str) -> Path:
    from ..exporter.hub import download  # needs an extra

    return download(hub_id)


def _exported(source: Path, quantize: str | None, progress: Progress | None) -> Package:
    """The package of a checkpoint folder, from the cache if it was exported before."""
    pass_ = _quantizer(quantize)

    def build(folder: Path) -> None:
        export_package(
            source,
            folder / source.name,
            transform=None if pass_ is None else lambda model: run(model, [pass_])[0],
            quantization=_record(quantize),
            passes=() if pass_ is None else (pass_name(pass_),),
            progress=progress,
        )

    key = cache_key(source=fingerprint(source), path=str(source.resolve()), quantize=_record(quantize))
    return Package.open(cached_folder("packages", key, build) / source.name)


def _quantized(package: Package, quantize: str, progress: Progress | None) -> Package:
    """A quantized copy of a package, from the cache if it was made before."""
    if package.record.quantization is not None:
        raise UsageError(f"{package.path} is quantized already: {package.record.quantization}")
    pass_ = _quantizer(quantize)
    assert pass_ is not None  # noqa: S101 -- quantize is not None

    def build(folder: Path) -> None:
        model, _ = run(package.load(), [pass_])
        write_package(
            model,
            package.path,
            folder / package.path.name,
            quantization=_record(quantize),
            passes=(*package.record.passes, pass_name(pass_)),
            progress=progress,
        )

    key = cache_key(source=package.content_hash, path=str(package.path.resolve()), quantize=_record(quantize))
    return Package.open(cached_folder("packages", key, build) / package.path.name)


def _quantizer(quantize: str | None) -> WeightOnlyQuantizationPass | None:
    return None if quantize is None else WeightOnlyQuantizationPass(_FORMATS[quantize])


def _record(quantize: str | None) -> dict[str, Any] | None:
    if quantize is None:
        return None
    form = _FORMATS[quantize]
    return {"method": quantize, "bits": form.bits, "block_size": form.block_size, "symmetric": form.symmetric}


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
