"""``carryall optimize``."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import click
import onnx_ir as ir
from rich.console import Console

from ...errors import CarryallError, GraphError, VerificationError
from ...exporter.package import DATA_FILE, MODEL_FILE
from ...graph_opt.compare.comparison import Bar, Comparison
from ...graph_opt.compare.verify import compare_graphs
from ...graph_opt.graph.weight_errors import float_weights
from ...graph_opt.pipeline import pipeline
from ...graph_opt.pipeline.bisect import first_failing_pass
from ...graph_opt.pipeline.report import Report
from ...providers.base import Provider
from ...runtime.models.model_source import locate_model
from ..models import graph_file, load_graph
from ..optimize_job import PORTABLE, Job
from ..options import json_option, quiet_option
from ..progress import progress
from ..provider_decoder import compare_with_provider
from ..report_file import check_report, write_report
from ..write_graph import check_output, write_graph
from .verify import MAX_ERROR, MAX_KL


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
@click.option(
    "--max-kl", default=MAX_KL, show_default=True, help="The bar of --verify: KL divergence in nats."
)
@click.option(
    "--max-error",
    default=MAX_ERROR,
    show_default=True,
    help="Its bar for graphs without logits: relative error.",
)
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
    max_kl: float,
    max_error: float,
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
    check_report(report_file)
    location = locate_model(source)
    check_output(location, out)
    job = Job(source, target, own, disable, context_length)
    graph, passes = job.make()
    originals = _originals(graph, reference) if report_file is not None else None
    graph, report = pipeline.run(graph, passes, disable=disable, debug=debug, originals=originals)
    report.facts |= {"source": source, "target": target}
    found = _verify(job, graph, report, Bar(max_kl, max_error)) if verify else None
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
        click.echo(str(found))


def _originals(graph: ir.Model, reference: str | None) -> dict[str, ir.TensorProtocol]:
    """Return the float weights that quantized ones are measured against."""
    return float_weights(graph if reference is None else load_graph(reference)[0])


def _verify(job: Job, graph: ir.Model, report: Report, bar: Bar) -> Comparison:
    """Compare the changed graph with the one it was made from.

    Raises:
        VerificationError: they differ by more than the bar; the message names the first pass that made them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        original = graph_file(job.source, Path(scratch, "original"))
        found = _compare(original, graph, Path(scratch), job.provider())
        reason = found.misses(bar)
        if reason is not None:
            culprit = first_failing_pass(
                job.make_enabled, report, lambda half: _fails(original, half, Path(scratch), bar)
            )
            raise VerificationError(
                f"the optimized graph differs from {job.source}: {reason}. It first does after "
                f"{culprit}. Nothing was written; --disable leaves a pass out"
            )
    report.facts["verification"] = dataclasses.asdict(found)
    return found


def _fails(original: Path, graph: ir.Model, scratch: Path, bar: Bar) -> bool | None:
    """Judge a graph half-way through the pipeline; None if it cannot be run."""
    try:
        return _compare(original, graph, scratch).misses(bar) is not None
    except CarryallError:
        return None


def _compare(original: Path, graph: ir.Model, scratch: Path, provider: Provider | None = None) -> Comparison:
    """Compare on the CPU; what onnxruntime cannot run there, through the provider, where it is available."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        changed = Path(folder, MODEL_FILE)
        ir.save(graph, changed, external_data=DATA_FILE)
        try:
            return compare_graphs(original, changed)
        except GraphError:
            if provider is None or provider.available() is not None:
                raise
        return compare_with_provider(original, changed, provider)
