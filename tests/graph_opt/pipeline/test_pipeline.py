from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import GraphError, UsageError
from carryall.graph_opt.lower.norms.skip_norm import SkipNormPass
from carryall.graph_opt.lower.quick_gelu import QuickGeluPass
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.remove_unused import RemoveUnusedNodesPass
from carryall.graph_opt.pipeline import pipeline

TEXT = """g (float[B, 4] x) => (float[B, 4] y) {
    s = Sigmoid(x) z = Mul(x, s) t = Add(z, w) y = RMSNormalization(t, w) }"""


def model() -> ir.Model:
    return graph(TEXT, w=np.ones(4, np.float32))


class BreakingPass(GraphPass):
    """Pass that removes a required input of a node."""

    def rewrite(self, graph: ir.Graph) -> None:
        graph[0].replace_input_with(0, None)
        self.fired += 1


class FailingPass(GraphPass):
    """Pass that raises an error."""

    def rewrite(self, graph: ir.Graph) -> None:
        raise KeyError("axis")


def passes() -> list[ir.passes.PassBase]:
    return [QuickGeluPass(), SkipNormPass(), RemoveUnusedNodesPass()]


def test_the_report_says_what_each_pass_did() -> None:
    result, report = pipeline.run(model(), passes(), debug=True)
    assert [node.op_type for node in result.graph] == ["QuickGelu", "Add", "RMSNormalization"]
    gelu, norm, clean = report.passes
    assert (gelu.name, gelu.fired, gelu.modified) == ("QuickGelu", 1, True)
    assert gelu.added == {"com.microsoft::QuickGelu": 1}
    assert gelu.removed == {"Mul": 1, "Sigmoid": 1}
    assert (norm.fired, norm.modified) == (0, False)
    assert [refusal.reason for refusal in norm.refusals] == ["it adds a weight"]
    assert clean.fired is None
    assert sum(report.before.values()) == 4
    assert sum(report.after.values()) == 3
    assert report.seconds == sum(one.seconds for one in report.passes) > 0


def test_the_report_as_json_and_text() -> None:
    _, report = pipeline.run(model(), passes())
    content = json.loads(report.to_json())
    assert [one["name"] for one in content["passes"]] == ["QuickGelu", "SkipNorm", "RemoveUnusedNodes"]
    assert content["passes"][1]["refusals"][0]["reason"] == "it adds a weight"
    assert "4 -> 3 nodes" in report.to_text()
    assert "it adds a weight" not in report.to_text()
    assert "it adds a weight" in report.to_text(explain=True)


def test_a_pass_can_be_disabled_by_name() -> None:
    result, report = pipeline.run(model(), passes(), disable=["QuickGelu"])
    assert [one.name for one in report.passes] == ["SkipNorm", "RemoveUnusedNodes"]
    assert report.disabled == ["QuickGelu"]
    assert result.graph[0].op_type == "Sigmoid"


def test_disabling_an_unknown_pass_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no pass is named QuickGelo; the passes are: QuickGelu, Remove"):
        pipeline.run(model(), passes(), disable=["QuickGelo"])


def test_debug_mode_names_the_pass_that_broke_the_graph() -> None:
    with pytest.raises(GraphError, match="pass Breaking produced an invalid model"):
        pipeline.run(model(), [BreakingPass()], debug=True)
    pipeline.run(model(), [BreakingPass()])  # unchecked by default


def test_a_pass_with_a_bug_is_named() -> None:
    with pytest.raises(GraphError, match="pass Failing failed: KeyError: 'axis'"):
        pipeline.run(model(), [FailingPass()])


def test_a_list_of_passes_counts_as_one_pass_with_the_refusals_of_all() -> None:
    manager = ir.passes.PassManager(passes(), steps=2, early_stop=False)
    _, report = pipeline.run(model(), [manager])
    (one,) = report.passes
    assert one.name == "PassManager"
    assert [refusal.reason for refusal in one.refusals] == ["it adds a weight"]


class ReturningOuterPass(GraphPass):
    """Pass that lets a branch return an outer value, which runtimes refuse."""

    def rewrite(self, graph: ir.Graph) -> None:
        (branch,) = [node for node in graph if node.op_type == "If"]
        branch.attributes["then_branch"].as_graph().outputs[0] = graph[0].outputs[0]
        self.fired += 1


def test_debug_mode_looks_into_subgraphs() -> None:
    text = """g (float[N] x, bool c) => (float[N] y) { z = Exp(x) y = If(c) <
        then_branch = t () => (float[N] a) { a = Abs(x) }, else_branch = e () => (float[N] b) { b = Neg(z) }
        > }"""
    with pytest.raises(GraphError, match="pass ReturningOuter produced an invalid model"):
        pipeline.run(graph(text), [ReturningOuterPass()], debug=True)


def test_debug_mode_accepts_external_weights_and_unknown_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ir.save(model(), tmp_path / "model.onnx", external_data="model.onnx.data", size_threshold_bytes=0)
    monkeypatch.chdir(tmp_path.parent)
    stored = ir.load(tmp_path / "model.onnx")
    pipeline.run(stored, passes(), debug=True)
    assert isinstance(stored.graph.initializers["w"].const_value, ir.ExternalTensor)
    odd = graph("g (float[B, 4] x) => (float[B, 4] y) { y = SimplifiedLayerNormalization(x, x) }")
    _, report = pipeline.run(odd, [RemoveUnusedNodesPass()], debug=True)
    assert report.after == {"SimplifiedLayerNormalization": 1}


def test_debug_mode_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRYALL_DEBUG", "1")
    with pytest.raises(GraphError, match="pass Breaking produced an invalid model"):
        pipeline.run(model(), [BreakingPass()])
