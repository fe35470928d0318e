"""Which pass of a pipeline broke the graph? Found by bisection over how many of the passes are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .pipeline import run
from .report import Report

Pipeline = tuple[ir.Model, Sequence[ir.passes.PassBase]]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first pass after which a graph fails.

    Attributes:
        suspects: its name; several in order where the graphs between them cannot be judged.
        runs: how many graphs were judged.
    """

    suspects: tuple[str, ...]
    runs: int

    def __str__(self) -> str:
        if len(self.suspects) == 1:
            return f"pass {self.suspects[0]}"
        return f"one of the passes {', '.join(self.suspects)}, between which the graph cannot be run"


def first_failing_pass(
    make: Callable[[], Pipeline], report: Report, fails: Callable[[ir.Model], bool | None]
) -> Culprit:
    """Find the first pass after which the graph fails, in log2(n) runs of a part of the pipeline.

    Args:
        make: makes the original graph, which does not fail, and the passes, all of them anew; none disabled.
        report: of the whole pipeline, whose result fails. Passes that modified nothing are not suspected.
        fails: judges a graph; None if it cannot be run, as graphs half-way to a target may be.
    """
    ends = [number for number, one in enumerate(report.passes, start=1) if one.modified]
    verdicts: dict[int, bool | None] = {}

    def verdict(position: int) -> bool | None:
        if position not in verdicts:
            verdicts[position] = fails(_prefix(make, ends[position]))
        return verdicts[position]

    good, bad = -1, len(ends) - 1  # positions in ``ends``; -1 is the original
    while bad - good > 1:
        middle = _judged_nearest((good + bad) // 2, good, bad, verdict)
        if middle is None:
            break
        if verdicts[middle]:
            bad = middle
        else:
            good = middle
    names = [report.passes[end - 1].name for end in ends[good + 1 : bad + 1]]
    return Culprit(tuple(names), len(verdicts))


def _judged_nearest(middle: int, good: int, bad: int, verdict: Callable[[int], bool | None]) -> int | None:
    """Return the position nearest to ``middle``, inside (good, bad), that can be judged; None without one."""
    inside = sorted(range(good + 1, bad), key=lambda position: abs(position - middle))
    return next((position for position in inside if verdict(position) is not None), None)


def _prefix(make: Callable[[], Pipeline], length: int) -> ir.Model:
    model, passes = make()
    return run(model, passes[:length])[0]
