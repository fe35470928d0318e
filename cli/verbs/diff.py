"""``carryall diff``."""

from __future__ import annotations

import click

from ...runtime.tasks.diff import diff
from ..options import json_option


@click.command("diff")
@click.argument("a")
@click.argument("b")
@json_option
@click.pass_context
def command(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Show how the graphs of two models differ.

    Nodes are matched by what they compute and what they read, not by name: a graph whose nodes and values are
    renamed, or listed in another order, is the same. Exit code 0 if there is no difference, 1 if there is one
    or the comparison failed, 2 for wrong use. Differences that recur in every layer are shown once; --json
    lists each of them.

    \b
    Examples:
        carryall diff model.onnx optimized.onnx
        carryall diff demo demo-int4 --json
        carryall diff before.onnx after.onnx > /dev/null && echo the same
    """
    found = diff(a, b)
    click.echo(found.to_json() if as_json else str(found))
    ctx.exit(0 if found.same else 1)
