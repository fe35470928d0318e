"""``carryall optimize``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ...runtime.tasks.optimize import optimize
from ...runtime.tasks.optimize_job import PORTABLE
from ..options import MOST_TOKENS, json_option, quiet_option
from ..progress import phases
from ..verify_options import bars_options, inputs_option


@click.command("optimize")
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target", default=PORTABLE, show_default=True, help=f"'{PORTABLE}', or a provider, such as 'cpu'."
)
@click.option("--explain", is_flag=True, help="Also list nodes that were not changed, and why.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a report of the passes: a page if it ends in .html, else JSON.",
)
@click.option("--reference", help="The float original of a quantized IN, to report the error of each layer.")
@click.option("--verify", is_flag=True, help="Compare the results with IN's; write nothing if they differ.")
@inputs_option
@bars_options
@click.option("--disable", multiple=True, metavar="PASS", help="Leave a pass out. May be repeated.")
@click.option(
    "--pass",
    "passes",
    multiple=True,
    metavar="PASS",
    help="Run your own pass, 'package.module.Class', or a pass that an installed package registers. May be "
    "repeated.",
)
@click.option(
    "--context-length",
    type=click.IntRange(1, MOST_TOKENS * 64),
    help="Maximum tokens of a sequence; the model's own by default.",
)
@click.option(
    "--debug", is_flag=True, help="Check the graph after every pass, and name the pass that broke it."
)
@json_option
@quiet_option
def command(source: str, out: Path, explain: bool, as_json: bool, quiet: bool, **settings: Any) -> None:
    """Optimize a model's graph for a target, and show what changed.

    IN is a package, a checkpoint, or an ONNX file; OUT is a new folder, or an ONNX file if it ends in .onnx.
    With the target "portable", the graph has standard operators only and runs everywhere. With a provider as
    the target, it uses the provider's kernels; run, chat and serve do this automatically, in the cache.
    Exit code 0 if OUT was written; 1 if a pass or --verify failed, and nothing was written; 2 for wrong use.

    \b
    Examples:
        carryall optimize traced/model.onnx decoder.onnx --explain
        carryall optimize demo demo-cpu --target cpu --explain --report report.html
        carryall optimize model.onnx smaller.onnx --pass mypackage.MyPass --verify
    """
    with working_folder_on_path(), phases(quiet=quiet or as_json) as tell:
        report = optimize(source, out, progress=tell, **settings)
    if as_json:
        click.echo(report.to_json())
    else:
        click.echo(report.to_text(explain=explain, width=Console().width))


@contextlib.contextmanager
def working_folder_on_path() -> Iterator[None]:
    """Allow imports from the working folder, as ``python -m`` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
