"""What docs/adding_a_pass.md shows works as it stands there, in a package installed beside carryall."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import graph_asserts
import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.graph_opt.pipeline.plugins import load_pass

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "adding_a_pass.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder as an installer leaves it: the document's module and its pyproject.toml's metadata."""
    site = tmp_path / "site"
    (project,) = (tomllib.loads(block)["project"] for block in blocks("toml"))
    info = site / f"my_passes-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (site / "my_passes.py").write_text(blocks("python")[0], encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in points.items())])
        for group, points in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "my_passes", raising=False)
    return site


@pytest.mark.usefixtures("installed")
def test_the_documented_pass_passes_its_documented_tests() -> None:
    made = type(load_pass("division"))
    namespace: dict[str, Any] = {"DivisionPass": made, "np": np, **vars(graph_asserts)}
    exec(compile(blocks("python")[1], str(DOCUMENT), "exec"), namespace)  # noqa: S102 -- our own document
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("spec", ["my_passes.DivisionPass", "my_passes:DivisionByConstant"])
def test_an_integer_division_stays(spec: str) -> None:
    model = graph_asserts.graph("g (int64[N] x) => (int64[N] y) { y = Div(x, c) }", c=np.int64(4))
    found = load_pass(spec)
    assert graph_asserts.apply(found, model) == ["the divisor is an integer or zero"]  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_the_command_line_runs_it_by_name_explains_and_verifies(tmp_path: Path) -> None:
    layers = "".join(f"d{i} = Exp(h{i - 1}) h{i} = Div(h{i - 1}, d{i}) " for i in range(1, 4))
    text = f"g (float[N, 4] x) => (float[N, 4] y) {{ h0 = Div(x, c) {layers} y = Neg(h3) }}"
    model = graph_asserts.graph(text, c=np.float32(4))
    for index, node in enumerate(model.graph):
        node.name = f"layers.{index}/{node.op_type}"
    ir.save(model, tmp_path / "model.onnx")
    out = tmp_path / "faster.onnx"
    arguments = ["optimize", str(tmp_path / "model.onnx"), str(out), "--pass", "division"]
    result = CliRunner().invoke(
        carryall, [*arguments, "--explain", "--verify", "--debug"], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    line = "Division refused layers.N/Div (3 nodes, first: layers.2/Div): the divisor is computed"
    assert line in result.stdout
    assert [node.op_type for node in ir.load(out).graph].count("Div") == 3
