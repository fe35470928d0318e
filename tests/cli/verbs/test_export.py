"""``carryall export`` and ``carryall quantize``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.long
def test_json_tells_what_was_written(tmp_path: Path) -> None:
    result = run("export", "demo", tmp_path / "out", "--quantize", "int4-fast", "--json")
    found = json.loads(result.stdout)
    expected = {"method": "int4-fast", "bits": 4, "block_size": 32, "symmetric": False, "embedding_bits": 8}
    assert expected.items() <= found["quantization"].items()
    assert found["quantization"]["recipe"] == {"method": "int4-fast"}
    assert (found["left_float"]["weights"], found["left_float"]["of"]) == (0, 57)
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert found["parameters"] > 1e6
    assert Package.open(tmp_path / "out").record.passes == ("WeightOnlyQuantization",)


@pytest.mark.long
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
        arguments[1], words, code = tiny_package, "already exported", 2
    else:
        arguments, words, code = [*arguments, "--quantize", "int3"], "int3", 2
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    left = {path.name for path in tmp_path.iterdir()} - {"source"}
    assert left == ({"out"} if kind == "full" else set())


@pytest.mark.long
@pytest.mark.parametrize("source", ["checkpoint", "package", "file"])
def test_quantize_takes_all_kinds(
    source: str, tiny_checkpoint: Path, tiny_package: Path, tmp_path: Path
) -> None:
    given = {"checkpoint": tiny_checkpoint, "package": tiny_package, "file": tiny_package / "model.onnx"}[
        source
    ]
    out = tmp_path / ("out.onnx" if source == "file" else "out")
    result = run("quantize", given, out, "--method", "int4-fast", "--block-size", 16, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bytes_after"] < found["bytes_before"] / 3
    assert found["quantization"]["block_size"] == 16
    model = ir.load(out if source == "file" else out / "model.onnx")
    types = {str(value.const_value.dtype) for value in model.graph.initializers.values() if value.const_value}
    assert "UINT4" in types
    verified = run("verify", given, out, "--max-kl", 20)  # random weights, rounded to 4 bits
    assert verified.exit_code == 0, verified.output


@pytest.mark.long
@pytest.mark.parametrize("verb", ["export", "quantize"])
def test_weights_that_stay_float_are_reported_and_recorded(verb: str, tmp_path: Path) -> None:
    """The 40 inputs of two down projections are not a multiple of 16: 2560 of 29760 weights, 8.6 %."""
    shares = {40: 0.086, 200: 0.209}
    for size, share in shares.items():
        source, out = tmp_path / f"source{size}", tmp_path / f"out{size}"
        write_tiny("llama", source, intermediate_size=size)
        option = "--quantize" if verb == "export" else "--method"
        command = [sys.executable, "-m", "carryall", verb, str(source), str(out), option, "int4-fast"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ.copy())
        text = f"2 of 16 weights stay float, {100 * share:.1f}"[:-1]
        reason = f"has {size} inputs, which is not a multiple of 16 (2)"
        assert text in done.stdout
        assert reason in done.stdout
        record = Package.open(out).record.quantization
        assert record is not None
        left = record["left_float"]
        assert (left["weights"], left["of"], left["share"]) == (2, 16, pytest.approx(share, abs=5e-3))
        assert ("warning: " in done.stderr) == (share > 0.1)
        assert (reason in done.stderr) == (share > 0.1)
        assert run("run", out, "abc", "--max-tokens", 2).exit_code == 0


def test_hidden_sizes_of_small_models_are_quantized_throughout(tmp_path: Path) -> None:
    """192 = 3 x 64 and 576 = 9 x 64: no weight stays float with any requested block size."""
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    write_tiny("llama", tmp_path / "source", **sizes, **heads)
    for size, blocks in ((128, {64}), (32, {32, 64})):  # the embedding, in 8 bits, has blocks of 64
        out = tmp_path / str(size)
        options = ("--method", "int4-fast", "--block-size", size, "--algorithm", "rtn", "--json")
        result = run("quantize", tmp_path / "source", out, *options)
        assert json.loads(result.stdout)["left_float"]["weights"] == 0
        nodes = [node for node in ir.load(out / "model.onnx").graph if node.op_type == "DequantizeLinear"]
        assert {node.attributes["block_size"].as_int() for node in nodes} == blocks
        lowered = tmp_path / f"cpu{size}.onnx"
        assert run("optimize", out, lowered, "--target", "cpu").exit_code == 0
        model = ir.load(lowered)
        for node in model.graph:
            if node.op_type == "MatMulNBits":
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)  # float activations
        ir.save(model, tmp_path / f"exact{size}.onnx")
        result = run("verify", out, tmp_path / f"exact{size}.onnx", "--max-kl", 1e-6)
        assert result.exit_code == 0, result.output


@pytest.mark.long
def test_quantize_refuses_what_it_cannot_do(tiny_package: Path, tmp_path: Path) -> None:
    assert (
        "block_size must be one of 16, 32, 64, 128, 256, or None, not '33'"
        in run("quantize", tiny_package, tmp_path / "a", "--block-size", 33).stderr
    )
    assert run("quantize", tiny_package, tmp_path / "a", "--block-size", 16).exit_code == 0
    again = run("quantize", tmp_path / "a", tmp_path / "b")
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "already quantized" in again.stderr
    assert not (tmp_path / "b").exists()
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copyfile(tiny_package / name, tmp_path / name)
    wrong = run("quantize", tmp_path / "model.onnx", tmp_path / "c", "--block-size", 16)
    assert (wrong.exit_code, "c.onnx" in wrong.stderr) == (2, True)
