"""``carryall.diff``: compare the graphs of two models by structure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...graph_opt.compare.diff import GraphDiff
from ...graph_opt.compare.diff import diff as diff_graphs
from ...graph_opt.graph.graph_facts import layer_pattern
from ...records import dataclass
from ...reports import Report
from ..models.graphs import load_graph
from ..types.arguments import checked_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport(Report):
    """The differences of two graphs.

    Attributes:
        a: the first model.
        b: the second model.
        differences: nodes, interface and weights that differ.
    """

    a: str
    b: str
    differences: GraphDiff

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return self.differences.same

    def to_dict(self) -> dict[str, Any]:
        return {"same": self.same, **dataclasses.asdict(self.differences)}

    def rows(self) -> list[tuple[str, str]]:
        differences = self.differences
        if self.same:
            return [("the same", f"{differences.matched} nodes")]
        only = f"{len(differences.only_a)} only in A, {len(differences.only_b)} only in B"
        counts = f"{differences.matched} in both, {only}"
        sections = ((title, "\n".join(_by_layer(lines))) for title, lines in _sections(differences))
        return [("nodes", counts), *((title, text) for title, text in sections if text)]

    def __str__(self) -> str:
        differences = self.differences
        if self.same:
            return f"the same: {differences.matched} nodes"
        only = f"{len(differences.only_a)} only in A, {len(differences.only_b)} only in B"
        text = f"{differences.matched} nodes in both, {only}"
        for title, lines in _sections(differences):
            shown = list(_by_layer(lines))
            text += f"\n\n{title}:" + "".join(f"\n  {line}" for line in shown) if shown else ""
        return text


@checked_arguments
def diff(a: str | Path, b: str | Path) -> DiffReport:
    """Compare the graphs of two models by structure, without running them.

    Nodes are matched by their operator, attributes and inputs, not by name or order.

    Args:
        a: a package, a checkpoint, an ONNX file, or ``demo``.
        b: the same.

    Raises:
        ModelNotFoundError: there is no such model.
        GraphError: an ONNX file cannot be read.
    """
    found = diff_graphs(load_graph(str(a))[0], load_graph(str(b))[0])
    return DiffReport(a=str(a), b=str(b), differences=found)


def _sections(differences: GraphDiff) -> Iterator[tuple[str, list[str]]]:
    yield "interface", list(differences.interface)
    yield (
        "operators, A -> B",
        [f"{name}: {old} -> {new}" for name, (old, new) in differences.operators.items()],
    )
    yield "only in A", [f"{op} {name}" for op, name in differences.only_a]
    yield "only in B", [f"{op} {name}" for op, name in differences.only_b]
    yield (
        "changed nodes",
        [f"{one.op_type} {one.a or one.b}: {change}" for one in differences.nodes for change in one.changes],
    )
    yield "changed weights", [f"{one.a}: {one.change}" for one in differences.weights]


def _by_layer(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; lines that differ only in the layer's number are merged into one with a count."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        groups[layer_pattern(line)].append(line)
    for pattern, members in groups.items():
        yield members[0] if len(members) == 1 else f"{len(members)} x {pattern}"
