"""Print the steps of ``carryall demo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...runtime.types.outputs import RequestOutput
from ..demo_steps import DemoStep
from ..generation import speed
from ..options import human_bytes

OPERATORS_SHOWN = 9


def show_steps(console: Console, steps: Sequence[DemoStep]) -> None:
    """Print each step, and the operators before and after."""
    table = Table(
        "step", "result", "nodes", "weights", "seconds", box=None, pad_edge=False, header_style="dim"
    )
    for step in steps:
        size = human_bytes(step.weight_bytes)
        table.add_row(step.name, step.result, str(step.nodes), size, f"{step.seconds:.1f}")
    console.print(Padding(table, (1, 0)))
    before, after = steps[0], steps[-1]
    graphs = [
        _operators(before, f"before: {before.nodes} nodes"),
        _operators(after, f"after: {after.nodes} nodes"),
    ]
    console.print(Padding(Columns(graphs, padding=(0, 4)), (0, 0, 1, 0)))


def _operators(step: DemoStep, title: str) -> Table:
    """Return the most frequent operators as bars."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    top = list(step.operators.items())[:OPERATORS_SHOWN]
    for name, count in top:
        table.add_row(name.split("::")[-1], Text("█" * max(1, round(count / 6)) + f" {count}", style="cyan"))
    rest = step.nodes - sum(count for _, count in top)
    table.add_row(f"{len(step.operators) - len(top)} others", Text(f"{rest}", style="dim"))
    return table


def document(steps: Sequence[DemoStep], prompt: str, output: RequestOutput) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {
        "prompt": prompt,
        "text": output.outputs[0].text,
        "tokens": len(output.outputs[0].token_ids),
        **{name: round(value, 4) for name, value in speed(output).items()},
        "nodes_before": steps[0].nodes,
        "nodes_after": steps[-1].nodes,
        "operators_before": steps[0].operators,
        "operators_after": steps[-1].operators,
        "weight_bytes_before": steps[0].weight_bytes,
        "weight_bytes_after": steps[-1].weight_bytes,
        "seconds": {step.name: round(step.seconds, 3) for step in steps},
    }
