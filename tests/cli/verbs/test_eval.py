"""``carryall eval``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "110"})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 6)
    return path


def test_a_model_and_its_reference(tiny_package: Path, text: Path) -> None:
    result = run("eval", tiny_package, "--text", text, "--reference", tiny_package, "--new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert "ratio 1.00000" in result.stdout
    assert "top-1 agreement:      100.00 %" in result.stdout
    assert "8 of 8 prompts throughout" in result.stdout


def test_json(tiny_package: Path, text: Path) -> None:
    result = run("eval", tiny_package, "--text", text, "--json", "--max-tokens", 200, "--window", 32)
    document = json.loads(result.stdout)
    assert document["tokens"] == 199
    assert document["perplexity"] > 1
    assert document["reference"] is document["mean_kl"] is document["greedy"] is None


def test_the_demo_has_its_own_text() -> None:
    document = json.loads(run("eval", "demo", "--max-tokens", 300, "--json").stdout)
    assert document["perplexity"] < 60


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "the text has 0 tokens; at least 16"), ("short", "the text has 5 tokens; at least 16")],
)
def test_too_little_text(tiny_package: Path, text: Path, content: str, message: str) -> None:
    text.write_text(content)
    result = run("eval", tiny_package, "--text", text)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_text_is_needed(tiny_package: Path) -> None:
    result = run("eval", tiny_package)
    assert result.exit_code == 2
    assert "a text to evaluate is missing: --text FILE" in result.stderr


def test_models_of_two_vocabularies(tiny_package: Path, text: Path) -> None:
    result = run("eval", tiny_package, "--text", text, "--reference", "demo")
    assert result.exit_code == 2
    assert "260 and 4096 tokens" in result.stderr


def test_a_missing_tokenizer_is_named(tiny_package: Path, text: Path, tmp_path: Path) -> None:
    file = shutil.copytree(tiny_package, tmp_path / "bare") / "model.onnx"
    (file.parent / "tokenizer.json").unlink()
    (file.parent / "carryall.json").unlink()
    result = run("eval", file, "--text", text)
    assert result.exit_code == 2
    assert "model.onnx has no tokenizer.json: add the file to its folder" in result.stderr
