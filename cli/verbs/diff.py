"""``carryall diff``."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator

import click

from ...graph_opt.compare.diff import GraphDiff, diff
from ...graph_opt.graph.graph_facts import layer_pattern
from ..models import load_graph
from ..options import json_option, print_json


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
    found = diff(load_graph(a)[0], load_graph(b)[0])
    if as_json:
        print_json({"same": found.same, **dataclasses.asdict(found)})
    else:
        click.echo("\n".join(_lines(found)))
    ctx.exit(0 if found.same else 1)


def _lines(found: GraphDiff) -> Iterator[str]:
    if found.same:
        yield f"the same: {found.matched} nodes"
        return
    yield f"{found.matched} nodes in both, {len(found.only_a)} only in A, {len(found.only_b)} only in B"
    yield from _section("interface", found.interface)
    yield from _section(
        "operators, A -> B", (f"{name}: {old} -> {new}" for name, (old, new) in found.operators.items())
    )
    yield from _section("only in A", (f"{op} {name}" for op, name in found.only_a))
    yield from _section("only in B", (f"{op} {name}" for op, name in found.only_b))
    yield from _section(
        "changed nodes",
        (f"{one.op_type} {one.a or one.b}: {change}" for one in found.nodes for change in one.changes),
    )
    yield from _section("changed weights", (f"{one.a}: {one.change}" for one in found.weights))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a title and the lines below it, those of all layers as one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        groups[layer_pattern(line)].append(line)
    if groups:
        yield f"\n{title}:"
    for pattern, members in groups.items():
        yield f"  {members[0]}" if len(members) == 1 else f"  {len(members)} x {pattern}"
