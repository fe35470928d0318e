"""The report of a pipeline: time, changes and refusals of each pass, and facts about the result."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from ...records import dataclass
from ..graph.graph_facts import layer_pattern
from ..passes.base import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """The report of one pass.

    Attributes:
        seconds: wall time of the pass.
        fired: number of rewrites; None if the pass does not count them.
        nodes: number of nodes after the pass.
        added, removed: number of nodes added and removed, by operator.
    """

    name: str
    seconds: float
    modified: bool
    fired: int | None
    nodes: int
    added: dict[str, int]
    removed: dict[str, int]
    refusals: list[Refusal]

    @property
    def did_anything(self) -> bool:
        """Whether the pass rewrote or refused anything."""
        return bool(self.fired or self.added or self.removed or self.refusals)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """Refusals of one pass with the same reason, which differ only in layer numbers.

    Attributes:
        nodes: the nodes' common name, with ``N`` for numbers that differ.
        count: number of nodes.
        first: the name of the first node.
    """

    pass_name: str
    nodes: str
    reason: str
    count: int
    first: str

    def __str__(self) -> str:
        many = f" ({self.count} nodes, first: {self.first})" if self.count > 1 else ""
        return f"{self.pass_name} refused {self.nodes}{many}: {self.reason}"


# Passes that write the same graph in another form, which alone is no reason to write a file anew.
_FORM_ONLY = frozenset({"LiftConstantsToInitializers", "LowerOpset", "LowestOpset", "NameFix", "RaiseOpset"})


@dataclass(slots=True)
class PipelineReport:
    """The report of a pipeline on one model.

    Attributes:
        before, after: number of nodes by operator.
        passes: one entry per pass, in order.
        disabled: names of skipped passes.
        weights_before, weights_after: number and bytes of the weights by element type.
        largest: the largest weights of the result.
        weight_errors: by quantized weight, norm(quantized - original) / norm(original).
        not_decoder: why the graph was not taken as a decoder; None if it was.
        facts: facts that the caller adds: names, versions, the result of a comparison.
    """

    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    passes: list[PassReport] = field(default_factory=list)
    disabled: list[str] = field(default_factory=list)
    weights_before: dict[str, dict[str, int]] = field(default_factory=dict)
    weights_after: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: list[dict[str, Any]] = field(default_factory=list)
    weight_errors: dict[str, float] = field(default_factory=dict)
    not_decoder: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def rewrote_nothing(self) -> bool:
        """Whether no pass changed more than the opset, names, and where constants are stored."""
        return all(one.name in _FORM_ONLY for one in self.passes if one.modified)

    @property
    def seconds(self) -> float:
        """Total wall time of all passes."""
        return sum(one.seconds for one in self.passes)

    @property
    def refusals(self) -> list[tuple[str, Refusal]]:
        """All refusals, each with the name of its pass."""
        return [(one.name, refusal) for one in self.passes for refusal in one.refusals]

    @property
    def near_misses(self) -> list[NearMiss]:
        """The refusals, grouped over layers."""
        groups: dict[tuple[str, str, str], list[Refusal]] = defaultdict(list)
        for name, refusal in self.refusals:
            groups[name, layer_pattern(refusal.node), layer_pattern(refusal.reason)].append(refusal)
        return [_near_miss(*key, group) for key, group in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types, as JSON and HTML show it."""
        near = [dataclasses.asdict(one) for one in self.near_misses]
        return {**dataclasses.asdict(self), "seconds": self.seconds, "near_misses": near}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self, *, explain: bool = False, width: int = 110) -> str:
        """Return the report as text of ``width`` columns; ``explain`` adds the near misses."""
        idle = [report for report in self.passes if not report.did_anything]
        busy = [report for report in self.passes if report.did_anything]
        longest = max((len(report.name) for report in busy), default=4)
        nodes = f"{sum(self.before.values())} -> {sum(self.after.values())} nodes"
        lines = [f"{nodes}, {self.seconds:.2f} s", ""]
        lines += (
            ["no pass found anything to rewrite: the model is copied"] if "unchanged" in self.facts else []
        )
        lines += [f"{'pass':<{longest}}{'fired':>7}{'nodes':>8}{'refused':>9}{'ms':>10}"] if busy else []
        for report in busy:
            lines += _lines(report, longest, width)
        if idle:
            spent = 1e3 * sum(report.seconds for report in idle)
            count = f"{len(idle)} {'pass' if len(idle) == 1 else 'passes'}"
            lines.append(f"{f'{count} changed nothing':<{longest + 24}}{spent:>10.1f}")
        for line in self._explanation(idle) if explain else self._hint():
            lines += _wrapped(line, width, "  " if line.startswith("- ") else "")
        return "\n".join(lines) + "\n"

    def _explanation(self, idle: list[PassReport]) -> Iterator[str]:
        """List the passes that changed nothing, why the graph is no decoder, and the near misses."""
        if idle:
            yield f"\nPasses that changed nothing: {', '.join(dict.fromkeys(one.name for one in idle))}."
        if self.not_decoder is not None:
            yield f"\nOptimized as any model, not as a decoder: {self.not_decoder}."
        misses = self.near_misses
        if not misses:
            yield "\nNo near misses: no pass refused a node."
            return
        yield "\nNear misses: these nodes stay unchanged, so results are correct but may be slower:"
        yield from (f"- {miss}" for miss in misses)

    def _hint(self) -> Iterator[str]:
        """Mention that ``--explain`` shows the near misses."""
        count = len(self.near_misses)
        if count:
            yield f"{count} near {'miss' if count == 1 else 'misses'}: --explain shows where and why."


def _near_miss(name: str, nodes: str, reason: str, group: list[Refusal]) -> NearMiss:
    alike = {one.node for one in group}, {one.reason for one in group}
    return NearMiss(
        pass_name=name,
        nodes=nodes if len(alike[0]) > 1 else group[0].node,
        reason=reason if len(alike[1]) > 1 else group[0].reason,
        count=len(group),
        first=group[0].node,
    )


def _lines(report: PassReport, longest: int, width: int) -> list[str]:
    """Return the figures of a pass, and below them the added and removed nodes; names are not broken."""
    fired = "" if report.fired is None else str(report.fired)
    refused = str(len(report.refusals)) if report.refusals else ""
    figures = f"{report.name:<{longest}}{fired:>7}{report.nodes:>8}{refused:>9}{report.seconds * 1e3:>10.1f}"
    changes = [f"+{count}\u00a0{op}" for op, count in report.added.items()]
    changes += [f"-{count}\u00a0{op}" for op, count in report.removed.items()]
    below = _wrapped("  " + ", ".join(changes), width, "  ") if changes else []
    return [figures, *(line.replace("\u00a0", " ") for line in below)]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Break a line between words, except at a no-break space."""
    if not text.strip():
        return [text]
    start = "\n" if text.startswith("\n") else ""
    lines = textwrap.wrap(
        text.lstrip("\n").replace("\u00a0", "\x00"),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return [*([""] if start else []), *(line.replace("\x00", "\u00a0") for line in lines)]
