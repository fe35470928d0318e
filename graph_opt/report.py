"""What a pipeline did: per pass its time, what it changed, and what it refused."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from .passes.base import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One pass's part of a report.

    Attributes:
        seconds: wall time of the pass alone.
        fired: rewrites made; None for a pass that does not count.
        added, removed: nodes by operator that this pass brought or took.
    """

    name: str
    seconds: float
    modified: bool
    fired: int | None
    nodes: int
    added: dict[str, int]
    removed: dict[str, int]
    refusals: list[Refusal]


@dataclass(slots=True)
class Report:
    """What a pipeline did to one model."""

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    passes: list[PassReport] = field(default_factory=list)
    disabled: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of all passes together."""
        return sum(one.seconds for one in self.passes)

    @property
    def refusals(self) -> list[tuple[str, Refusal]]:
        """All refusals, each with the name of the pass that made it."""
        return [(one.name, refusal) for one in self.passes for refusal in one.refusals]

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def to_text(self, *, explain: bool = False, width: int = 110) -> str:
        """Return the report for a terminal; with ``explain``, every refusal and its reason too."""
        table = Table(
            title=f"{sum(self.before.values())} -> {sum(self.after.values())} nodes, {self.seconds:.2f} s"
        )
        for column in ("pass", "fired", "nodes", "refused", "ms", "changes"):
            table.add_column(column, justify="left" if column in ("pass", "changes") else "right")
        for one in self.passes:
            table.add_row(*_row(one))
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(table)
            for name, refusal in self.refusals if explain else ():
                console.print(f"{name} left {refusal.node} alone: {refusal.reason}", markup=False)
        return capture.get()


def _row(one: PassReport) -> list[Any]:
    changes = [f"+{count} {op}" for op, count in one.added.items()]
    changes += [f"-{count} {op}" for op, count in one.removed.items()]
    fired = "" if one.fired is None else str(one.fired)
    refused = str(len(one.refusals)) if one.refusals else ""
    return [one.name, fired, str(one.nodes), refused, f"{one.seconds * 1e3:.1f}", ", ".join(changes)]


def count_operators(model: ir.Model) -> dict[str, int]:
    """Count nodes by operator, subgraphs included; those of other domains are written ``domain::Op``."""
    names = (
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )
    return dict(sorted(Counter(names).items()))
