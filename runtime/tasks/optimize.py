"""``carryall.optimize``: rewrite a model's graph for a target."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...errors import CarryallError, GraphError, UsageError, VerificationError
from ...exporter.package import DATA_FILE, MODEL_FILE
from ...graph_opt.compare.bars import Bars
from ...graph_opt.compare.report import VerifyReport
from ...graph_opt.compare.verify import verify as verify_graphs
from ...graph_opt.graph.weight_errors import float_weights
from ...graph_opt.pipeline import pipeline
from ...graph_opt.pipeline.bisect import first_failing_pass
from ...graph_opt.pipeline.report import Report as PassesReport
from ...progress import Progress, phase
from ...providers.base import Provider
from ..evaluate.provider_decoder import verify_with_provider
from ..models.graphs import graph_file, load_graph, stated_context
from ..models.model_source import locate_model
from ..models.write_graph import check_output, write_graph
from ..types.arguments import checked_arguments
from ..types.report import Report
from .optimize_job import PORTABLE, Job
from .report_file import check_report, pending_report


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeReport(Report):
    """A model that was rewritten and written.

    Attributes:
        path: the model.
        passes: what each pass did, with times, counts and refusals.
        verification: how far its results are from the original's; None if they were not compared.
    """

    path: Path
    passes: PassesReport
    verification: VerifyReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """See ``Report``."""
        return self.passes.to_dict()

    def rows(self) -> list[tuple[str, str]]:
        """See ``Report``."""
        before, after = sum(self.passes.before.values()), sum(self.passes.after.values())
        rows = [
            ("model", str(self.path)),
            ("nodes", f"{before} -> {after}"),
            ("seconds", f"{self.passes.seconds:.2f}"),
            *((one.name, f"{one.fired} rewrites") for one in self.passes.passes if one.fired),
        ]
        return rows if self.verification is None else [*rows, ("verified", self.verification.text())]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, explain: bool = False, width: int = 110) -> str:
        """Return a table of the passes; with ``explain`` also what was left alone, and why."""
        text = self.passes.to_text(explain=explain, width=width).rstrip("\n")
        return text if self.verification is None else f"{text}\n{self.verification.text()}"


@checked_arguments
def optimize(
    model: str | Path,
    out: str | Path,
    *,
    target: str = PORTABLE,
    passes: Sequence[str] = (),
    disable: Sequence[str] = (),
    context_length: int | None = None,
    verify: bool = False,
    inputs: str | Path | None = None,
    bars: Bars | None = None,
    report: str | Path | None = None,
    reference: str | Path | None = None,
    debug: bool = False,
    progress: Progress | None = None,
) -> OptimizeReport:
    """Rewrite a model's graph for a target.

    Args:
        model: a package, a checkpoint folder, a hub id, an ONNX file, or ``demo``.
        out: a new folder, or an ONNX file if it ends in ``.onnx``.
        target: ``portable`` keeps to standard operators; a provider's name brings its kernels.
        passes: passes of your own, ``package.module.Class`` or names that installed packages offer.
        disable: names of passes to leave out.
        context_length: most tokens of a sequence; None takes the model's own.
        verify: compare the results with the original's before anything is written.
        inputs: for ``verify``, an .npz file of tensors or a folder of such files; made up by default.
        bars: what ``verify`` allows; by default what the graphs' arithmetic explains.
        report: a file for what each pass did: HTML if it ends in .html, else JSON.
        reference: the float original of a quantized model, for the report's error of each layer.
        debug: check the graph after every pass.
        progress: told about every tensor written, in bytes.

    Raises:
        UsageError: there is no such model, target or pass; ``out`` exists; or the context length is unknown.
        VerificationError: the results differ; the message names the first pass after which they do.
        GraphError: a pass failed.
        OSError: the disk is full, or the like. Neither ``out`` nor ``report`` is left behind.
    """
    source, out, file = str(model), Path(out), None if report is None else Path(report)
    if inputs is not None and not verify:
        raise UsageError("inputs are for verify (--verify), which is not asked for")
    check_report(file)
    location = locate_model(source)
    check_output(location, out)
    job = Job(source, target, tuple(passes), tuple(disable), context_length)
    graph, chosen = job.make()
    originals = _originals(graph, reference) if file is not None else None
    graph, done = pipeline.run(graph, chosen, disable=disable, debug=debug, originals=originals)
    done.facts |= {"source": source, "target": target}
    found = _verify(job, graph, done, _Check(source, inputs, bars)) if verify else None
    names = tuple(one.name for one in done.passes)
    with contextlib.nullcontext() if file is None else pending_report(done, file):
        write_graph(graph, location, out, passes=names, progress=phase(progress, "write"))
    return OptimizeReport(path=out, passes=done, verification=found)


def _originals(graph: ir.Model, reference: str | Path | None) -> dict[str, ir.TensorProtocol]:
    """Return the float weights that quantized ones are measured against."""
    return float_weights(graph if reference is None else load_graph(str(reference))[0])


@dataclass(frozen=True, slots=True)
class _Check:
    """How a changed graph is compared with the one it was made from."""

    source: str
    inputs: str | Path | None
    bars: Bars | None

    def __call__(self, original: Path, graph: ir.Model, provider: Provider | None = None) -> VerifyReport:
        """Compare on the CPU; what onnxruntime cannot run there, through the provider, if it is available."""
        names = (self.source, "the optimized graph")
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder, MODEL_FILE)
            ir.save(graph, changed, external_data=DATA_FILE)
            try:
                return verify_graphs(
                    original,
                    changed,
                    None if self.inputs is None else Path(self.inputs),
                    self.bars,
                    context_length=stated_context(self.source),
                    names=names,
                )
            except GraphError:
                if provider is None or provider.available() is not None:
                    raise
            return verify_with_provider(original, changed, provider, self.bars or Bars(), names)

    def fails(self, original: Path, graph: ir.Model) -> bool | None:
        """Judge a graph half-way through the pipeline; None if it cannot be run."""
        try:
            return not self(original, graph).passed
        except CarryallError:
            return None


def _verify(job: Job, graph: ir.Model, report: PassesReport, check: _Check) -> VerifyReport:
    """Compare the changed graph with the one it was made from.

    Raises:
        VerificationError: they differ by more than the bars; the message names the first pass that made them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        original = graph_file(job.source, Path(scratch, "original"))
        found = check(original, graph, job.provider())
        if not found.passed:
            culprit = first_failing_pass(job.make_enabled, report, lambda half: check.fails(original, half))
            raise VerificationError(
                f"the optimized graph differs from {job.source}: {found.reason}. It first does after "
                f"{culprit}. Nothing was written; --disable leaves a pass out"
            )
    report.facts["verification"] = found.to_dict()
    return found
