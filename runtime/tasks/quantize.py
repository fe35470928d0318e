"""``carryall.quantize``: quantize the weights of a model, and optionally its KV cache."""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import CarryallWarning, GraphError, UsageError
from ...graph_opt.graph import graph_facts
from ...graph_opt.graph.edit import nodes_of
from ...graph_opt.passes.normalize.raise_opset import RaiseOpsetPass
from ...graph_opt.pipeline import pipeline
from ...graph_opt.pipeline.report import PipelineReport
from ...graph_opt.quantize.formats.half import is_half
from ...graph_opt.quantize.formats.kv_cache import has_quantized_kv
from ...graph_opt.quantize.left_float import LeftFloat
from ...graph_opt.quantize.recipe import NO_METHOD, QuantizationRecipe
from ...progress import Progress, phase
from ...records import dataclass
from ...reports import Report, human_bytes
from ...storage.scratch import scratch_folder
from ..evaluate.quantization_cost import check_measurable, measure_cost, summary
from ..models.building import quantized_head
from ..models.graphs import float_source, load_graph, model_place
from ..models.model_source import locate_model
from ..models.quantized_graph import QuantizedGraph, float_model, quantize_graph
from ..models.write_graph import check_output, write_graph
from ..types.arguments import checked_arguments
from .report_file import check_report, left_without_report, write_report

_OLDEST_OPSET = 21  # the first whose DequantizeLinear has blocks and 4 bits


class QuantizationWarning(CarryallWarning):
    """More than 10 % of the weight bytes of a quantized model stay float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport(Report):
    """The result of a quantization.

    Attributes:
        path: the written model.
        recipe: the recipe.
        quantization: the package's record of its quantization.
        weights: number of quantized weights.
        kv_layers: number of layers with a quantized KV cache.
        left_float: the weights that stayed float.
        bytes_before: size of all weights before.
        bytes_after: size of all weights after.
        seconds: wall time.
        cost: with ``report``, the measurements ``fidelity``, ``speed`` and ``layer_errors``.
        passes: the report of the passes.
    """

    path: Path
    recipe: QuantizationRecipe
    quantization: dict[str, Any]
    weights: int
    kv_layers: int
    left_float: LeftFloat
    bytes_before: int
    bytes_after: int
    seconds: float
    cost: dict[str, Any] = field(default_factory=dict)
    passes: PipelineReport

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "quantization": self.quantization,
            "weights": self.weights,
            "kv_layers": self.kv_layers,
            "left_float": self.left_float.to_dict(),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": round(self.seconds, 3),
            **self.cost,
        }

    def rows(self) -> list[tuple[str, str]]:
        rows = [
            ("model", str(self.path)),
            ("recipe", self.recipe.to_json()),
            ("quantized", self._done()),
            ("weights", f"{human_bytes(self.bytes_before)} -> {human_bytes(self.bytes_after)}"),
        ]
        rows += [("float", str(self.left_float))] if self.left_float.weights else []
        return [*rows, ("cost", summary(self.cost))] if self.cost else rows

    def __str__(self) -> str:
        sizes = f"{human_bytes(self.bytes_before)} -> {human_bytes(self.bytes_after)}"
        lines = [f"{self.path}: {self._done()}, {sizes}"]
        if self.left_float.weights and self.recipe.method != NO_METHOD:
            lines.append(str(self.left_float))
        others = [one for one in self.passes.near_misses if not one.reason.startswith("weight ")]
        lines += [f"not done by {one.pass_name}: {one.reason}" for one in others]
        return "\n".join([*lines, summary(self.cost)] if self.cost else lines)

    def _done(self) -> str:
        done = [] if self.recipe.method == NO_METHOD else [f"{self.weights} weights to {self.recipe.method}"]
        kept = self.quantization.get("weight_only", [])
        done += [f"{len(kept)} of them with float activations"] if kept else []
        done += [f"KV cache of {self.kv_layers} layers to {self.recipe.kv}"] if self.recipe.kv else []
        return ", ".join(done)


@checked_arguments
def quantize(
    model: str | Path,
    out: str | Path,
    recipe: QuantizationRecipe | str = "int4",
    *,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize the weights of a model, and optionally its KV cache.

    The result uses standard operators only and runs on every provider.

    Args:
        model: a package, a checkpoint folder, a hub id, an ONNX file, or ``demo``; not quantized yet.
        out: a new folder, or an ONNX file if it ends in ``.onnx``.
        recipe: a recipe, or the name of a method.
        report: a file for the measured cost in quality and gain in speed: HTML if it ends in .html, else
            JSON.
        progress: called in the phases ``calibrate``, ``measure``, ``quantize`` and ``evaluate``.

    Returns:
        The report. ``QuantizationWarning`` is issued if more than 10 % of the weight bytes stay float
        although the recipe does not exempt them.

    Raises:
        UsageError: there is no such model, it is already quantized, ``out`` exists, or the recipe does not
            fit the model.
        GraphError: a weight or an activation is NaN or infinite.
        OSError: a file cannot be written, for instance on a full disk; ``out`` is deleted, unless the message
            says otherwise.
    """
    start = time.perf_counter()
    recipe = QuantizationRecipe(recipe) if isinstance(recipe, str) else recipe
    source, out, file = str(model), Path(out), None if report is None else Path(report)
    _check_files(source, out, file)
    graph, package = load_graph(source)
    _check(graph, source, recipe)
    graph = _with_blocks(graph, source)
    before = _weight_bytes(graph)
    facts = float_source(source, graph)
    with (
        scratch_folder() as scratch,
        float_model(facts, graph, recipe, scratch, progress, keeps=True) as measured,
    ):
        done = quantize_graph(graph, measured, recipe)
        earlier = (package.record.quantization if package is not None else None) or {}
        record = {**earlier, **done.record}
        names = tuple(one.name for one in done.report.passes)
        tell = phase(progress, "quantize")
        place = locate_model(source)
        write_graph(
            done.model,
            place,
            out,
            passes=names,
            quantization=record,
            change_head=lambda head: quantized_head(head, recipe, place),
            progress=tell,
        )
        result = _report(out, recipe, done, record, before, time.perf_counter() - start)
        if file is not None:
            with left_without_report(out, file):
                cost = measure_cost(source, out, done.passes, measured, scratch, progress)
                result = dataclasses.replace(result, cost=cost)
                done.report.facts |= {"source": source, "target": str(out), **result.to_dict()}
                write_report(done.report, file)
    if recipe.method != NO_METHOD:
        warn_of_much_float(str(out), record, done.left)
    return result


def _report(
    out: Path,
    recipe: QuantizationRecipe,
    done: QuantizedGraph,
    record: dict[str, Any],
    before: int,
    seconds: float,
) -> QuantizeReport:
    """Return the report of a written model, without its measured cost; ``before`` are the float bytes."""
    passes = done.report.passes
    return QuantizeReport(
        path=out,
        recipe=recipe,
        quantization=record,
        weights=(passes[-1].fired or 0) if recipe.method != NO_METHOD else 0,
        kv_layers=sum(one.fired or 0 for one in passes if one.name == "QuantizeKV"),
        left_float=done.left,
        bytes_before=before,
        bytes_after=_weight_bytes(done.model),
        seconds=seconds,
        passes=done.report,
    )


def warn_of_much_float(name: str, record: dict[str, Any], left: LeftFloat) -> None:
    """Warn if a large part of the weights stays float although the recipe does not exempt them."""
    if left.much and left.reasons:
        text = f"{name} is only partly {record['method']}: {left}"
        warnings.warn(text, QuantizationWarning, stacklevel=4)


def _check_files(source: str, out: Path, report: Path | None) -> None:
    """Check before any work what will be read and written.

    Raises:
        UsageError: there is no such model, ``out`` exists, or the report cannot be measured or written.
    """
    check_report(report)
    if report is not None:
        check_measurable(source)
    check_output(model_place(source), out)


def _check(model: ir.Model, source: str, recipe: QuantizationRecipe) -> None:
    """Raise UsageError if the model is already quantized, or has no cache that can be."""
    if recipe.method != NO_METHOD and graph_facts.has_quantized_weights(model.graph):
        raise UsageError(f"{source} is already quantized; start from the float model")
    if is_half(model.graph):
        raise UsageError(f"{source} already has 16-bit weights; start from the float model")
    if recipe.kv is not None and has_quantized_kv(model.graph):
        raise UsageError(f"the KV cache of {source} is already quantized; start from the float model")
    if recipe.kv is not None and not any(nodes_of(model.graph, "Attention")):
        raise UsageError(
            f"{source} has no Attention operator whose KV cache could be quantized; "
            f"first run: carryall optimize {source} OUT --target portable"
        )


def _with_blocks(model: ir.Model, source: str) -> ir.Model:
    """Return the model in an opset whose DequantizeLinear has blocks and 4 bits.

    Raises:
        GraphError: it has operators without an equivalent there.
    """
    model, report = pipeline.run(model, [RaiseOpsetPass()])
    if model.opset_imports[""] < _OLDEST_OPSET:
        reasons = dict.fromkeys(refusal.reason for _, refusal in report.refusals)
        raise GraphError(
            f"{source} cannot be quantized, which needs opset {_OLDEST_OPSET}: {'; '.join(reasons)}"
        )
    return model


def _weight_bytes(model: ir.Model) -> int:
    return sum(graph_facts.stored(tensor).nbytes for tensor in graph_facts.initializers(model))
