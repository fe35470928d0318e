"""``carryall.export``: convert a checkpoint to a portable package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...errors import UsageError
from ...exporter.adapter import adapter_fingerprint, merge_adapter
from ...exporter.config import RawConfig, read_config
from ...exporter.encoders.names import is_encoder
from ...exporter.export import Build, ExportedGraph, Tensors, export_model
from ...exporter.gguf.file import GGUF_SUFFIX
from ...exporter.layouts.transformers_js import arrange
from ...exporter.optimum import trace
from ...exporter.package import Package, fingerprint
from ...exporter.package_writing import check_empty, new_folder
from ...exporter.rope_scaling import parse_rope_scaling
from ...exporter.safetensors_files import safetensors_of
from ...graph_opt.graph import graph_facts
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.pipeline.pipelines import portable_passes
from ...graph_opt.quantize.left_float import LeftFloat
from ...graph_opt.quantize.recipe import QuantizationRecipe
from ...progress import Progress
from ...records import dataclass
from ...reports import Report, human_bytes
from ...storage.scratch import scratch_folder
from ..models.building import build_export
from ..models.encoder_package import export_encoder_package
from ..models.exported import scaled_content
from ..models.find import find_model
from ..types.arguments import checked_arguments
from .quantize import warn_of_much_float


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
        facts = asdict(self)
        facts["left_float"] = self.left_float.to_dict() if self.left_float is not None else None
        return {**facts, "path": str(self.path), "seconds": round(self.seconds, 3)}

    def rows(self) -> list[tuple[str, str]]:
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
    rope_scaling: str | None = None,
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
        rope_scaling: extend the context by a scaling of the rotary embedding, in place of the model's own:
            ``yarn:4``, ``linear:2`` or ``dynamic:2``, see ``ModelConfig``.
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
    if rope_scaling is not None:
        _check_scaled(source, path, rope_scaling, traces=via is not None)
    recipe = QuantizationRecipe(quantize) if isinstance(quantize, str) else quantize
    start = time.perf_counter()
    check_empty(out)  # before any work
    if via is None and path.is_dir() and is_encoder(read_config(path)):
        options = {"adapter": adapter is not None, "layout": layout != "carryall"}
        package, graph, left = export_encoder_package(
            path, out, options, progress, recipe, text_only=text_only
        )
        return _report(package, out, graph, left, start)
    blind = text_only or via is not None or layout != "carryall"
    with scratch_folder() as traced, _arranged(out, layout) as folder:
        build = _merging(adapter) if via is None else partial(_traced, path, traced)
        package, graph, left = build_export(
            path,
            folder,
            recipe,
            scaled_content(_content(path, adapter), rope_scaling),
            progress,
            build,
            text_only=blind,
            rope_scaling=rope_scaling,
        )
    if left is not None:
        warn_of_much_float(str(out), graph.quantization or {}, left)
    return _report(package, out, graph, left, start)


@contextmanager
def _arranged(out: Path, layout: str) -> Iterator[Path]:
    """Yield the folder to write a package into, and bring its files into the layout at the end."""
    if layout == "carryall":
        yield out
        return
    with new_folder(out) as folder:
        yield folder / "package"
        arrange(folder / "package", folder)
        (folder / "package").rmdir()


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


def _check_scaled(source: str | Path, path: Path, rope_scaling: str, *, traces: bool) -> None:
    """Check before any work that the rope of a source can be scaled.

    Raises:
        UsageError: Optimum exports it, it is a text encoder, or ``rope_scaling`` is invalid.
    """
    parse_rope_scaling(rope_scaling)
    if traces:
        raise UsageError("rope_scaling is applied by carryall's own exporter; omit via")
    if path.is_dir() and is_encoder(read_config(path)):
        raise UsageError(f"{source} is a text encoder, whose rotary embedding is fixed; omit rope_scaling")


def _merging(adapter: Path | None) -> Build | None:
    """Return how to build a graph with a LoRA adapter in its weights; None for the weights as they are."""
    if adapter is None:
        return None

    def build(folder: Path, config: RawConfig, tensors: Tensors) -> ExportedGraph:
        merged = merge_adapter(safetensors_of(folder) if tensors is None else tensors, adapter)
        return ExportedGraph(export_model(folder, config, merged), folder)

    return build


def _traced(checkpoint: Path, scratch: Path, folder: Path, _: RawConfig, __: Tensors) -> ExportedGraph:
    """Return the graph that Optimum traces, made portable; ``scratch`` holds its weights."""
    model, report = run(trace(checkpoint, scratch), portable_passes())
    return ExportedGraph(model, folder, passes=tuple(one.name for one in report.passes))


def _content(path: Path, adapter: Path | None) -> str:
    """Return a text that changes whenever the checkpoint or the adapter does."""
    return fingerprint(path) if adapter is None else f"{fingerprint(path)} {adapter_fingerprint(adapter)}"


def _report(
    package: Package, out: Path, graph: ExportedGraph, left: LeftFloat | None, start: float
) -> ExportReport:
    return ExportReport(
        path=out,
        model_type=package.record.model_type,
        parameters=graph_facts.parameter_count(graph.model),
        nodes=sum(graph_facts.operators(graph.model).values()),
        quantization=graph.quantization,
        left_float=left,
        bytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        seconds=time.perf_counter() - start,
    )
