"""Find the pass that broke a graph, by bisection over the number of passes that are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ...records import dataclass
from .pipeline import run
from .report import PipelineReport

Pipeline = tuple[ir.Model, Sequence[ir.passes.PassBase]]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first pass after which a graph fails.

    Attributes:
        suspects: its name; several names, in order, if the graphs between those passes cannot be run.
        runs: number of graphs that were tested.
    """

    suspects: tuple[str, ...]
    runs: int

    def __str__(self) -> str:
        if len(self.suspects) == 1:
            return f"pass {self.suspects[0]}"
        return f"one of the passes {', '.join(self.suspects)} (the graph cannot be run between them)"


def first_failing_pass(
    make: Callable[[], Pipeline], report: PipelineReport, fails: Callable[[ir.Model], bool | None]
) -> Culprit:
    """Find the first pass after which the graph fails, in log2(n) runs of a prefix of the pipeline.

    Args:
        make: returns a new copy of the original graph, which does not fail, and new instances of all passes.
        report: the report of the whole pipeline, whose result fails. Passes that modified nothing are
            skipped.
        fails: tests a graph; returns None if it cannot be run, which is possible between lowering passes.
    """
    ends = [number for number, one in enumerate(report.passes, start=1) if one.modified]
    verdicts: dict[int, bool | None] = {}

    def verdict(position: int) -> bool | None:
        if position not in verdicts:
            verdicts[position] = fails(_prefix(make, ends[position]))
        return verdicts[position]

    good, bad = -1, len(ends) - 1  # positions in ``ends``; -1 is the original
    while bad - good > 1:
        middle = _nearest_testable((good + bad) // 2, good, bad, verdict)
        if middle is None:
            break
        if verdicts[middle]:
            bad = middle
        else:
            good = middle
    names = [report.passes[end - 1].name for end in ends[good + 1 : bad + 1]]
    return Culprit(tuple(names), len(verdicts))


def _nearest_testable(middle: int, good: int, bad: int, verdict: Callable[[int], bool | None]) -> int | None:
    """Return the position nearest to ``middle`` in (good, bad) whose graph can be run, None without one."""
    inside = sorted(range(good + 1, bad), key=lambda position: abs(position - middle))
    return next((position for position in inside if verdict(position) is not None), None)


def _prefix(make: Callable[[], Pipeline], length: int) -> ir.Model:
    model, passes = make()
    return run(model, passes[:length])[0]
