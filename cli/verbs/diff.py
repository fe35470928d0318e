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
    """Compare the graphs of two models.

    Nodes are matched by operator, attributes and inputs, not by name: a graph with renamed nodes and values,
    or in another order, is the same. Exit code 0 if there is no difference, 1 if there is one or the
    comparison failed, 2 for wrong use. Differences that recur in every layer are shown once; --json lists all
    of them.

    \b
    Examples:
        carryall diff model.onnx optimized.onnx
        carryall diff demo demo-int4 --json
        carryall diff before.onnx after.onnx > /dev/null && echo the same
    """
    found = diff(a, b)
    click.echo(found.to_json() if as_json else str(found))
    ctx.exit(0 if found.same else 1)
