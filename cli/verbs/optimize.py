"""``carryall optimize``."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import onnx_ir as ir
from rich.console import Console

from ...errors import CarryallError, GraphError, UsageError, VerificationError
from ...exporter.package import DATA_FILE, MODEL_FILE
from ...graph_opt.compare.bars import Bars
from ...graph_opt.compare.report import VerifyReport
from ...graph_opt.compare.verify import verify as verify_graphs
from ...graph_opt.graph.weight_errors import float_weights
from ...graph_opt.pipeline import pipeline
from ...graph_opt.pipeline.bisect import first_failing_pass
from ...graph_opt.pipeline.report import Report
from ...providers.base import Provider
from ...runtime.models.model_source import locate_model
from ..models import graph_file, load_graph, stated_context
from ..optimize_job import PORTABLE, Job
from ..options import json_option, quiet_option
from ..progress import progress
from ..provider_decoder import verify_with_provider
from ..report_file import check_report, write_report
from ..write_graph import check_output, write_graph
from .verify import inputs_option, max_error_option, max_kl_option, max_mismatch_option


@click.command("optimize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target", default=PORTABLE, show_default=True, help=f"'{PORTABLE}', or a provider, such as 'cpu'."
)
@click.option("--explain", is_flag=True, help="Also list what was left alone, and why.")
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what each pass did: a page if it ends in .html, else JSON.",
)
@click.option(
    "--reference", help="The float original of a quantized IN, for the report's error of each layer."
)
@click.option("--verify", is_flag=True, help="Compare the results with IN's; write nothing if they differ.")
@inputs_option
@max_kl_option
@max_error_option
@max_mismatch_option
@click.option("--disable", multiple=True, metavar="PASS", help="Leave a pass out. May be repeated.")
@click.option(
    "--pass",
    "own",
    multiple=True,
    metavar="PASS",
    help="Run a pass of your own, 'package.module.Class', or one that an installed package offers by name. "
    "May be repeated.",
)
@click.option(
    "--context-length", type=click.IntRange(1), help="Longest sequence; the model's own by default."
)
@click.option(
    "--debug", is_flag=True, help="Check the graph after every pass, and name the one that broke it."
)
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    target: str,
    explain: bool,
    report_file: Path | None,
    reference: str | None,
    verify: bool,
    inputs: Path | None,
    max_kl: float | None,
    max_error: float | None,
    max_mismatch: float,
    disable: tuple[str, ...],
    own: tuple[str, ...],
    context_length: int | None,
    debug: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Rewrite a model's graph for a target, and show what changed.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    With the target "portable", the graph keeps to standard operators and runs everywhere. With a provider as
    the target, it gets that provider's own kernels; run, chat and serve do so by themselves, in a cache.
    Exit code 0 if OUT was written; 1 if a pass, or --verify, failed, and then nothing was; 2 for wrong use.

    \b
    Examples:
        carryall optimize traced/model.onnx decoder.onnx --explain
        carryall optimize demo demo-cpu --target cpu --explain --report report.html
        carryall optimize model.onnx smaller.onnx --pass mypackage.MyPass --verify
    """
    if inputs is not None and not verify:
        raise UsageError("--inputs are for --verify, and it is not given")
    check_report(report_file)
    location = locate_model(source)
    check_output(location, out)
    job = Job(source, target, own, disable, context_length)
    graph, passes = job.make()
    originals = _originals(graph, reference) if report_file is not None else None
    graph, report = pipeline.run(graph, passes, disable=disable, debug=debug, originals=originals)
    report.facts |= {"source": source, "target": target}
    bars = Bars(max_kl=max_kl, max_error=max_error, max_mismatch=max_mismatch)
    found = _verify(job, graph, report, _Check(source, inputs, bars)) if verify else None
    names = tuple(one.name for one in report.passes)
    with progress("write", quiet=quiet or as_json) as tell:
        write_graph(graph, location, out, passes=names, progress=tell)
    if report_file is not None:
        write_report(report, report_file)
    if as_json:
        click.echo(report.to_json())
        return
    click.echo(report.to_text(explain=explain, width=Console().width), nl=False)
    if found is not None:
        click.echo(found.text())


def _originals(graph: ir.Model, reference: str | None) -> dict[str, ir.TensorProtocol]:
    """Return the float weights that quantized ones are measured against."""
    return float_weights(graph if reference is None else load_graph(reference)[0])


@dataclass(frozen=True, slots=True)
class _Check:
    """How a changed graph is compared with IN."""

    source: str
    inputs: Path | None
    bars: Bars

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
                    self.inputs,
                    self.bars,
                    context_length=stated_context(self.source),
                    names=names,
                )
            except GraphError:
                if provider is None or provider.available() is not None:
                    raise
            return verify_with_provider(original, changed, provider, self.bars, names)

    def fails(self, original: Path, graph: ir.Model) -> bool | None:
        """Judge a graph half-way through the pipeline; None if it cannot be run."""
        try:
            return not self(original, graph).passed
        except CarryallError:
            return None


def _verify(job: Job, graph: ir.Model, report: Report, check: _Check) -> VerifyReport:
    """Compare the changed graph with the one it was made from.

    Raises:
        VerificationError: they differ by more than the bar; the message names the first pass that made them.
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
