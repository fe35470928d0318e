"""``carryall.export``: convert a checkpoint to a portable package."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import onnx_ir as ir

from ...errors import UsageError
from ...exporter.adapter import adapter_fingerprint, merge_adapter
from ...exporter.config import context_lengths, read_config
from ...exporter.encoders.names import is_encoder
from ...exporter.export import check_float, export_model, opened, sight
from ...exporter.gguf.file import GGUF_SUFFIX
from ...exporter.layouts.transformers_js import arrange
from ...exporter.optimum import trace
from ...exporter.package import Package, fingerprint
from ...exporter.package_writing import check_paths, check_tokenizer, new_folder, write_package
from ...exporter.safetensors_files import safetensors_of
from ...graph_opt.graph import graph_facts
from ...graph_opt.passes.base import pass_name
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import portable_passes
from ...graph_opt.quantize.left_float import LeftFloat
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress, phase
from ...reports import Report, human_bytes
from ...storage.scratch import scratch_folder
from ...storage.stored_tensor import StoredTensor
from ..models.find import find_model
from ..models.float_model import FloatSource
from ..types.arguments import checked_arguments
from .export_encoder import check_encoder_options, export_encoder_package
from .quantize import warn_of_much_float
from .quantized_graph import QuantizedGraph, float_model, quantize_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport(Report):
    """The result of an export.

    Attributes:
        path: the package.
        model_type: the model family.
        parameters: number of values of all weights.
        nodes: number of nodes of the graph.
        quantization: the package's record of its quantization, None for float32.
        left_float: weights that quantization left float; None without quantization.
        bytes: total size of the package's files.
        seconds: wall time.
    """

    path: Path
    model_type: str
    parameters: int | None
    nodes: int
    quantization: dict[str, Any] | None
    left_float: LeftFloat | None
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """See ``Report``."""
        facts = asdict(self)
        facts["left_float"] = self.left_float.to_dict() if self.left_float is not None else None
        return {**facts, "path": str(self.path), "seconds": round(self.seconds, 3)}

    def rows(self) -> list[tuple[str, str]]:
        """See ``Report``."""
        rows = [
            ("package", str(self.path)),
            ("family", self.model_type),
            ("parameters", f"{(self.parameters or 0) / 1e6:,.1f} M, {self._format()}"),
            ("size", human_bytes(self.bytes)),
            ("seconds", f"{self.seconds:.1f}"),
        ]
        return [*rows, ("float", str(self.left_float))] if self._some_float() else rows

    def __str__(self) -> str:
        parameters = f"{(self.parameters or 0) / 1e6:,.1f} M parameters, {self._format()}"
        size = f"{human_bytes(self.bytes)}, {self.seconds:.1f} s"
        line = f"{self.path}: {self.model_type}, {parameters}, {size}"
        return f"{line}\n{self.left_float}" if self._some_float() else line

    def _format(self) -> str:
        return str(self.quantization["method"]) if self.quantization else "float32"

    def _some_float(self) -> bool:
        return self.left_float is not None and self.left_float.weights > 0


@checked_arguments
def export(
    source: str | Path,
    out: str | Path,
    *,
    quantize: QuantizationRecipe | str | None = None,
    via: Literal["optimum"] | None = None,
    adapter: str | Path | None = None,
    layout: Literal["carryall", "transformers.js"] = "carryall",
    text_only: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Convert a Hugging Face checkpoint to a portable ONNX package.

    Weights are read, changed and written one by one, so the model may be larger than the memory.

    Args:
        source: a checkpoint folder, a GGUF file, a hub id, or ``demo``.
        out: the package, a new folder; it does not exist if anything fails.
        quantize: a quantization recipe or the name of a method.
        via: ``optimum`` traces the model with Optimum and torch, for families without an exporter.
        adapter: a folder with a LoRA adapter of PEFT, which is merged into the weights.
        layout: ``transformers.js`` writes the folder that this library loads in browsers and Node.js, with
            ``onnx/model_q4.onnx`` and its keys of config.json; it is no package of carryall.
        text_only: leave out what a model sees pictures with.
        progress: called for every tensor, in bytes.

    Raises:
        UsageError: there is no such model, or ``out`` exists.
        UnsupportedModelError: no exporter supports the model.
        CheckpointError: a file is missing or damaged.
        OSError: a file cannot be written, for instance on a full disk.
    """
    path, out = find_model(source), Path(out)
    adapter = None if adapter is None else Path(adapter)
    _check_source(source, path, merges=adapter is not None, traces=via is not None)
    recipe = QuantizationRecipe(quantize) if isinstance(quantize, str) else quantize
    start = time.perf_counter()
    with scratch_folder() as scratch, scratch_folder() as traced, opened(path) as (folder, tensors, stored):
        if recipe is not None:
            check_float(path, stored)
        config = check_paths(folder, out)  # before any work
        check_tokenizer(folder)
        if via is None and is_encoder(config):
            options = {"quantize": recipe is not None, "adapter": adapter is not None}
            check_encoder_options(config["model_type"], {**options, "layout": layout != "carryall"})
            package, model = export_encoder_package(path, folder, out, config, progress)
            return _report(package, out, _Graph(model), start)
        found = _built(folder, tensors, adapter) if via is None else _traced(path, traced)
        found, content = found._replace(record=stored), _content(path, adapter)
        blind = text_only or via is not None or layout != "carryall"
        seen = None if blind else sight(folder, config, tensors)
        if recipe is not None:
            facts = _float_source(path, folder, content)
            measured = float_model(facts, found.model, recipe, scratch, progress)
            done = quantize_graph(found.model, measured, recipe)
            warn_of_much_float(str(out), done.record, done.left)
            found = found.quantized(done)
        write = partial(
            write_package,
            found.model,
            folder,
            quantization=found.record,
            content=content,
            passes=found.passes,
            sight=seen,
            progress=phase(progress, "export"),
        )
        package = write(out=out) if layout == "carryall" else _for_transformers_js(write, out)
        return _report(package, out, found, start)


class _Graph(NamedTuple):
    """An exported graph: the passes that changed it, its quantization, and the weights left float by it."""

    model: ir.Model
    passes: Sequence[str] = ()
    record: dict[str, Any] | None = None
    left: LeftFloat | None = None

    def quantized(self, done: QuantizedGraph) -> _Graph:
        """Return the graph after a quantization."""
        return _Graph(done.model, [*self.passes, *map(pass_name, done.passes)], done.record, done.left)


def _check_source(source: str | Path, path: Path, *, merges: bool, traces: bool) -> None:
    """Check before any work that a source can be exported.

    Args:
        source: as the user named it.
        path: where it is.
        merges: whether an adapter is merged into its weights.
        traces: whether Optimum exports it.

    Raises:
        UsageError: it is exported already, or an adapter is to be merged by Optimum.
    """
    if (path.is_file() and path.suffix.lower() != GGUF_SUFFIX) or Package.is_package(path):
        raise UsageError(f"{source} is already exported; see 'carryall quantize' and 'carryall optimize'")
    if merges and traces:
        raise UsageError("adapter is merged by carryall's own exporter; omit via, or merge it with PEFT")


def _built(folder: Path, tensors: Mapping[str, StoredTensor] | None, adapter: Path | None) -> _Graph:
    """Return the graph that carryall's exporter builds, with an adapter merged into its weights.

    Args:
        folder: configuration and tokenizer of the checkpoint.
        tensors: its weights; None for those in the folder.
        adapter: the folder of a LoRA adapter; None for the weights as they are.
    """
    if adapter is not None:
        tensors = merge_adapter(safetensors_of(folder) if tensors is None else tensors, adapter)
    return _Graph(export_model(folder, tensors=tensors))


def _traced(checkpoint: Path, scratch: Path) -> _Graph:
    """Return the graph that Optimum traces, made portable; ``scratch`` holds its weights."""
    model, made = run(trace(checkpoint, scratch), portable_passes())
    return _Graph(model, [one.name for one in made.passes])


def _content(path: Path, adapter: Path | None) -> str:
    """Return a text that changes whenever the checkpoint or the adapter does."""
    return fingerprint(path) if adapter is None else f"{fingerprint(path)} {adapter_fingerprint(adapter)}"


def _float_source(path: Path, folder: Path, content: str) -> FloatSource:
    length = context_lengths(read_config(folder))[1]
    return FloatSource(name=str(path), folder=folder, context_length=length, key=lambda: content)


def _report(package: Package, out: Path, found: _Graph, start: float) -> ExportReport:
    return ExportReport(
        path=out,
        model_type=package.record.model_type,
        parameters=graph_facts.parameter_count(found.model),
        nodes=sum(graph_facts.operators(found.model).values()),
        quantization=found.record,
        left_float=found.left,
        bytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        seconds=time.perf_counter() - start,
    )


def _for_transformers_js(write: Callable[..., Package], out: Path) -> Package:
    """Write a package, and arrange its files in the folder ``out``."""
    with new_folder(out) as folder:
        package = write(out=folder / "package")
        arrange(package.path, folder)
        package.path.rmdir()
    return package
