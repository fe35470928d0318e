"""``carryall diff``."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def changed(tiny_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package's graph with other names, and another epsilon in every norm."""
    model = ir.load(tiny_package / "model.onnx")
    for number, node in enumerate(model.graph):
        node.name = f"layers.{number}/renamed"
        if node.op_type == "RMSNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
    path = tmp_path_factory.mktemp("changed") / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return path


def test_a_model_and_its_export_are_the_same(tiny_checkpoint: Path, tiny_package: Path) -> None:
    result = run("diff", tiny_checkpoint, tiny_package)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the same: ")


def test_differences_of_all_layers_are_one_line(tiny_package: Path, changed: Path) -> None:
    result = run("diff", tiny_package, changed)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "changed nodes:" in result.stdout
    assert "x RMSNormalization model.layers.N" in result.stdout
    assert "epsilon: 1e-05 -> 0.5" in result.stdout
    assert "only in A:" not in result.stdout


def test_json_lists_each(tiny_package: Path, changed: Path) -> None:
    result = run("diff", tiny_package, changed, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["same"] is False
    assert len(found["nodes"]) == 5
    assert {one["op_type"] for one in found["nodes"]} == {"RMSNormalization"}
    assert (found["only_a"], found["only_b"], found["weights"]) == ([], [], [])
