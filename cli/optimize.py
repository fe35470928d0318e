"""``carryall optimize``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import onnx_ir as ir
from rich.console import Console

from ..exporter.package import DATA_FILE, MODEL_FILE
from ..graph_opt import pipeline
from ..graph_opt.pipelines import portable_passes
from ..graph_opt.plugins import load_pass
from ..graph_opt.verify import Comparison
from ..providers import get_provider, provider_names
from ..providers.base import RunnerConfig
from ..runtime.errors import UsageError, VerificationError
from ..runtime.model_source import locate_model
from .models import default_context_length, graph_file, load_graph
from .options import json_option, quiet_option
from .progress import progress
from .verify import MAX_KL, compare_files, describe, too_different
from .write_graph import write_graph

PORTABLE = "portable"


@click.command("optimize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target", default=PORTABLE, show_default=True, help=f"'{PORTABLE}', or a provider, such as 'cpu'."
)
@click.option("--explain", is_flag=True, help="Also list what was left alone, and why.")
@click.option(
    "--report", "report_file", type=click.Path(path_type=Path), help="Write what each pass did, as JSON."
)
@click.option("--verify", is_flag=True, help="Compare the results with IN's; write nothing if they differ.")
@click.option(
    "--max-kl", default=MAX_KL, show_default=True, help="The bar of --verify: KL divergence in nats."
)
@click.option("--disable", multiple=True, metavar="PASS", help="Leave a pass out. May be repeated.")
@click.option(
    "--pass", "extra", multiple=True, metavar="MODULE:CLASS", help="Run a pass of your own. May be repeated."
)
@click.option(
    "--context-length", type=click.IntRange(1), help="Longest sequence; the model's own by default."
)
@json_option
@quiet_option
def command(
    source: str,
    out: Path,
    target: str,
    explain: bool,
    report_file: Path | None,
    verify: bool,
    max_kl: float,
    disable: tuple[str, ...],
    extra: tuple[str, ...],
    context_length: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Rewrite a model's graph for a target, and show what changed.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    With the target "portable", the graph keeps to standard operators and runs everywhere. With a provider as
    the target, it gets that provider's own kernels; run, chat and serve do so by themselves, in a cache.

    \b
    Examples:
        carryall optimize demo demo-cpu --target cpu --explain
        carryall optimize model.onnx smaller.onnx --pass mypackage.passes:MyPass --verify
    """
    graph, _ = load_graph(source)
    own = [load_pass(spec) for spec in extra]
    passes = _target_passes(target, own, context_length or default_context_length(source, graph))
    graph, report = pipeline.run(graph, passes, disable=disable)
    found = _verify(source, graph, max_kl) if verify else None
    names = tuple(one.name for one in report.passes)
    with progress("write", quiet=quiet or as_json) as tell:
        write_graph(graph, locate_model(source), out, passes=names, progress=tell)
    if report_file is not None:
        report_file.write_text(report.to_json() + "\n", encoding="utf-8")
    if as_json:
        click.echo(report.to_json())
        return
    click.echo(report.to_text(explain=explain, width=Console().width), nl=False)
    if found is not None:
        click.echo(describe(found))


def _target_passes(
    target: str, own: list[ir.passes.PassBase], context_length: int | None
) -> list[ir.passes.PassBase]:
    """Return the passes of a target, with the user's own between the portable ones and those for kernels.

    Raises:
        UsageError: there is no such target, or nothing says how long sequences may be.
    """
    if target == PORTABLE:
        return [*portable_passes(), *own]
    if target not in provider_names():
        raise UsageError(
            f"unknown target '{target}'; the targets are: {', '.join([PORTABLE, *provider_names()])}"
        )
    if context_length is None:
        raise UsageError("the graph does not say how long a sequence may be; add --context-length")
    lowering = get_provider(target).passes(RunnerConfig(context_length=context_length))
    return [*portable_passes(), *own, *lowering]


def _verify(source: str, graph: ir.Model, max_kl: float) -> Comparison:
    """Compare the changed graph with the one it was made from.

    Raises:
        VerificationError: they differ by more than ``max_kl``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        changed = Path(scratch, MODEL_FILE)
        ir.save(graph, changed, external_data=DATA_FILE)
        found = compare_files(graph_file(source, Path(scratch, "original")), changed)
    if not found.kl <= max_kl:
        raise VerificationError(too_different(found, "the optimized graph", source, max_kl))
    return found
