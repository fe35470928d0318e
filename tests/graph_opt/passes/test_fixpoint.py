from __future__ import annotations

import onnx_ir as ir
import pytest
from graph_asserts import assert_same, graph
from onnx_ir.passes import common

from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.fixpoint import Fixpoint
from carryall.graph_opt.pipeline.pipeline import run


class LastNegPass(GraphPass):
    """Removes one Neg a run, and refuses to touch anything else."""

    def rewrite(self, graph: ir.Graph) -> None:
        for node in [node for node in graph if node.op_type == "Neg"][-1:]:
            source = node.inputs[0]
            assert source is not None
            node.outputs[0].replace_all_uses_with(source)
            graph.remove(node, safe=True)
            self.fired += 1
        self.refuse(graph[0], "it is no Neg")


def model() -> ir.Model:
    return graph("g (float[N] x) => (float[N] y) { a = Neg(x) b = Neg(a) c = Neg(b) y = Abs(c) }")


def test_passes_run_until_nothing_changes() -> None:
    fixpoint = Fixpoint("Negs", [LastNegPass(), common.RemoveUnusedNodesPass()])
    result, report = run(model(), [fixpoint])
    assert_same(result, graph("g (float[N] x) => (float[N] y) { y = Abs(x) }"))
    (one,) = report.passes
    assert (one.name, one.fired, one.removed) == ("Negs", 3, {"Neg": 3})
    assert [refusal.node for refusal in one.refusals] == ["Abs"]  # of the last round only


@pytest.mark.parametrize(("rounds", "left"), [(1, 3), (2, 2)])
def test_rounds_are_bounded(rounds: int, left: int) -> None:
    result, report = run(model(), [Fixpoint("Negs", [LastNegPass()], max_rounds=rounds)])
    assert len(list(result.graph)) == left
    assert report.passes[0].modified
