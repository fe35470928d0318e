from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import UsageError
from carryall.graph_opt.lower.norms.skip_norm import SkipNormPass
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.passes.rules import RulePass
from carryall.graph_opt.pipeline import plugins

METADATA = "Metadata-Version: 2.1\nName: their-passes\nVersion: 1.0\n"


class NeedyPass(GraphPass):
    """Pass whose constructor requires an argument."""

    def __init__(self, needed: int) -> None:
        super().__init__()
        self.needed = needed

    def rewrite(self, graph: ir.Graph) -> None: ...


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with passes, one of them broken."""
    folder = tmp_path / "their_passes-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    (folder / "entry_points.txt").write_text(
        f"[{plugins.ENTRY_POINT_GROUP}]\nsilu = silu_rule:Silu\ngone = their_passes.gone:GonePass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("separator", [".", ":"])
def test_passes_load_from_anywhere(separator: str) -> None:
    spec = f"carryall.graph_opt.lower.norms.skip_norm{separator}SkipNormPass"
    assert isinstance(plugins.load_pass(spec), SkipNormPass)


def test_a_rule_becomes_a_pass_of_its_name() -> None:
    rule = plugins.load_pass("silu_rule.Silu")
    assert isinstance(rule, RulePass)
    assert rule.name == "Silu"
    model = graph("g (float[N] x) => (float[N] y) { s = Sigmoid(x) y = Mul(x, s) }")
    assert rule(model).modified
    assert rule.fired == 1


@pytest.mark.usefixtures("installed")
def test_installed_packages_offer_passes_by_name() -> None:
    assert {"silu", "gone"} <= set(plugins.installed_passes())
    assert isinstance(plugins.load_pass("silu"), RulePass)
    with pytest.raises(UsageError, match=r"no installed package registers a pass 'slow-gelu'.*silu"):
        plugins.load_pass("slow-gelu")
    with pytest.raises(UsageError, match=r"their_passes\.gone:GonePass cannot be imported"):
        plugins.load_pass("gone")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("skip_norm", "'package.module.Class'"),
        (".Pass", "'package.module.Class'"),
        ("module:", "'package.module.Class'"),
        ("nowhere.at_all.Pass", "cannot be imported"),
        ("carryall.graph_opt.lower.norms.skip_norm.Missing", "is neither a subclass of onnx_ir"),
        ("carryall.graph_opt.graph.edit:insert", "is neither a subclass of onnx_ir"),
        (f"{__name__}:NeedyPass", "constructible without arguments"),
    ],
)
def test_a_bad_pass_name_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plugins.load_pass(spec)
