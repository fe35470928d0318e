"""``carryall quantize --report``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "110"})


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (("--method", "int8-fast", "--block-size", 16, "--kv", "int8"), 15),
        pytest.param(("--method", "int8-static", "--block-size", 16, "--smooth"), 15, marks=pytest.mark.slow),
        pytest.param(("--method", "bf16"), 15, marks=pytest.mark.slow),
        pytest.param(("--method", "none", "--kv", "int8"), 15, marks=pytest.mark.slow),
    ],
)
def test_the_price_of_every_method(
    tiny_package: Path, tmp_path: Path, options: tuple[object, ...], measured: int
) -> None:
    file = tmp_path / "report.json"
    result = run("quantize", tiny_package, tmp_path / "out", *options, "--report", file)
    assert result.exit_code == 0, result.output
    assert "top-1 agreement" in result.stdout
    facts = json.loads(file.read_text())["facts"]
    assert len(facts["layer_errors"]) == measured
    assert all(error < 0.2 for error in facts["layer_errors"].values())
    fidelity, speed = facts["fidelity"], facts["speed"]
    assert fidelity["text"] == "the end of the calibration text"
    assert 0.95 < fidelity["perplexity_ratio"] < 1.05
    assert 0 <= fidelity["mean_kl"] < 0.1
    assert fidelity["greedy"]["prompts"] == 8
    assert speed["before"]["decode"]["median"] > 0 < speed["after"]["prefill"]["median"]
    assert "provider cpu" in facts["machine"]


@pytest.mark.long
def test_the_page_shows_it(tiny_package: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    options = ("--method", "int8-dynamic", "--block-size", 16, "--report", file)
    assert run("quantize", tiny_package, tmp_path / "out", *options).exit_code == 0
    page = file.read_text()
    for text in ("Fidelity", "same likeliest token", "prefill", "Error of each layer&#39;s output"):
        assert text.replace("&#39;", "'") in page
    assert "model.layers.N.mlp.down_proj.weight" in page


def test_without_a_tokenizer_nothing_begins(tiny_package: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_package, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").unlink()
    result = run("quantize", tmp_path / "in", tmp_path / "out", "--report", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr
    assert not (tmp_path / "out").exists()
