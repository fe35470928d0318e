"""Bisection against the obvious oracle: the first prefix that fails."""

from __future__ import annotations

import math

import onnx_ir as ir
from graph_asserts import graph
from hypothesis import given
from hypothesis import strategies as st

from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.pipeline.bisect import first_failing_pass
from carryall.graph_opt.pipeline.pipeline import run


class StepPass(GraphPass):
    """Notes that it ran, in the name of the graph."""

    def __init__(self, name: str, *, idle: bool) -> None:
        super().__init__()
        self.name = name
        self.idle = idle

    def rewrite(self, graph: ir.Graph) -> None:
        if not self.idle:
            graph.name = f"{graph.name} {self.name}"
            self.fired += 1


@given(
    idle=st.lists(st.booleans(), min_size=1, max_size=40),
    culprit=st.integers(0, 39),
    unjudged=st.sets(st.integers(0, 39), max_size=6),
)
def test_the_first_failing_pass_is_among_the_suspects(
    idle: list[bool], culprit: int, unjudged: set[int]
) -> None:
    culprit %= len(idle)
    idle[culprit] = False

    def make() -> tuple[ir.Model, list[ir.passes.PassBase]]:
        model = graph("g (float[N] x) => (float[N] y) { y = Abs(x) }")
        return model, [StepPass(str(number), idle=quiet) for number, quiet in enumerate(idle)]

    def fails(model: ir.Model) -> bool | None:
        done = [int(name) for name in str(model.graph.name).split()[1:]]
        return None if done and done[-1] in unjudged else bool(done) and done[-1] >= culprit

    model, passes = make()
    _, report = run(model, passes)
    found = first_failing_pass(make, report, fails)
    assert str(culprit) in found.suspects
    active = [number for number, quiet in enumerate(idle) if not quiet]
    if not unjudged & set(active[:-1]):
        assert found.suspects == (str(culprit),)
        assert found.runs <= math.ceil(math.log2(len(active))) if len(active) > 1 else found.runs == 0
    else:  # no more suspects than the passes around the graphs that cannot be judged
        judged_between = [one for one in found.suspects[:-1] if int(one) not in unjudged]
        assert judged_between == []


def test_several_suspects_are_said_to_be_such() -> None:
    def make() -> tuple[ir.Model, list[ir.passes.PassBase]]:
        model = graph("g (float[N] x) => (float[N] y) { y = Abs(x) }")
        return model, [StepPass(name, idle=False) for name in "abc"]

    model, passes = make()
    _, report = run(model, passes)
    found = first_failing_pass(make, report, lambda _: None)
    assert str(found) == "one of the passes a, b, c (the graph cannot be run between them)"
    assert str(first_failing_pass(make, report, lambda model: "c" in str(model.graph.name))) == "pass c"
