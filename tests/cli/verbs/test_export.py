"""``carryall export`` and ``carryall quantize``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny

from carryall.cli import carryall
from carryall.exporter.package import Package


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


def test_a_checkpoint_becomes_a_package(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = run("export", tiny_checkpoint, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'out'}: llama, ")
    assert result.stderr == ""
    assert set(Package.open(tmp_path / "out").integrity().values()) == {""}


def test_json_tells_what_was_written(tmp_path: Path) -> None:
    result = run("export", "demo", tmp_path / "out", "--quantize", "int4", "--json")
    found = json.loads(result.stdout)
    assert found["quantization"] == {"method": "int4", "bits": 4, "block_size": 128, "symmetric": True}
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert found["parameters"] > 1e6
    assert Package.open(tmp_path / "out").record.passes == ("WeightOnlyQuantization",)


def test_warnings_are_one_line_on_stderr(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    save_file({**load_file(weights), "left.over": load_file(weights)["model.norm.weight"]}, weights)
    command = [sys.executable, "-m", "carryall", "export", str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ.copy())
    assert done.stderr.startswith("warning: ")
    assert "left.over" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "kind", ["missing", "full", "no weights", "unknown family", "a package", "an option"]
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    kind: str, tiny_checkpoint: Path, tiny_package: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_tiny("llama", source)
    config = json.loads((source / "config.json").read_text())
    arguments: list[object] = ["export", source, out]
    if kind == "missing":
        arguments[1], words, code = tmp_path / "nowhere", "no file or folder", 2
    elif kind == "full":
        (out / "mine").mkdir(parents=True)
        words, code = "is not empty", 2
    elif kind == "no weights":
        (source / "model.safetensors").unlink()
        words, code = "safetensors", 1
    elif kind == "unknown family":
        (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
        words, code = "llama", 2
    elif kind == "a package":
        arguments[1], words, code = tiny_package, "exported already", 2
    else:
        arguments, words, code = [*arguments, "--quantize", "int3"], "int3", 2
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    left = {path.name for path in tmp_path.iterdir()} - {"source"}
    assert left == ({"out"} if kind == "full" else set())


@pytest.mark.parametrize("source", ["checkpoint", "package", "file"])
def test_quantize_takes_all_kinds(
    source: str, tiny_checkpoint: Path, tiny_package: Path, tmp_path: Path
) -> None:
    given = {"checkpoint": tiny_checkpoint, "package": tiny_package, "file": tiny_package / "model.onnx"}[
        source
    ]
    out = tmp_path / ("out.onnx" if source == "file" else "out")
    result = run("quantize", given, out, "--block-size", 16, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bytes_after"] < found["bytes_before"] / 3
    assert found["quantization"]["block_size"] == 16
    model = ir.load(out if source == "file" else out / "model.onnx")
    types = {str(value.const_value.dtype) for value in model.graph.initializers.values() if value.const_value}
    assert "INT4" in types
    verified = run("verify", given, out, "--max-kl", 5)
    assert verified.exit_code == 0, verified.output


def test_quantize_says_what_stays_float(tiny_package: Path, tmp_path: Path) -> None:
    result = run("quantize", tiny_package, tmp_path / "out", "--method", "int8", "--block-size", 32)
    assert result.exit_code == 0, result.output
    assert "left float: weight model.layers.0.mlp.down_proj.weight has 48 inputs" in result.stdout
    assert "weights to int8" in result.stdout


def test_quantize_refuses_what_it_cannot_do(tiny_package: Path, tmp_path: Path) -> None:
    assert "33 is none of 16" in run("quantize", tiny_package, tmp_path / "a", "--block-size", 33).stderr
    assert run("quantize", tiny_package, tmp_path / "a", "--block-size", 16).exit_code == 0
    again = run("quantize", tmp_path / "a", tmp_path / "b")
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "quantized already" in again.stderr
    assert not (tmp_path / "b").exists()
    wrong = run("quantize", tiny_package / "model.onnx", tmp_path / "c", "--block-size", 16)
    assert (wrong.exit_code, "c.onnx" in wrong.stderr) == (2, True)
