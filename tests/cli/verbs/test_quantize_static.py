"""``carryall quantize``: static int8, 16 bits, and invalid input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file
from tiny_models import random_weights, tiny_config, write_tiny

from carryall.cli import carryall
from carryall.exporter.package import Package
from carryall.graph_opt.graph.lazy import Array
from carryall.graph_opt.quantize.calibration.calibrators import CALIBRATORS
from carryall.graph_opt.quantize.search.ranges import input_histograms

BLOCKS = ("--block-size", 16)


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "110"})


def divergence(out: Path, reference: Path, tmp_path: Path) -> float:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    options = ("--text", text, "--reference", reference, "--prompts", 0, "--json")
    return float(json.loads(run("eval", out, *options).stdout)["mean_kl"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(folder: Path, name: str, change: Callable[[Array], object]) -> Path:
    """Return a checkpoint with one weight changed in place."""
    write_tiny("llama", folder)
    weights = random_weights(tiny_config("llama"), dtype=np.float32)
    change(weights[name].reshape(-1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def broken(folder: Path, name: str, value: float) -> Path:
    """Return a checkpoint with ``value`` in one weight; in an embedding, in a row that no text uses."""
    return checkpoint(folder, name, lambda weight: weight.put(-40, value, mode="wrap"))


@pytest.mark.long
def test_static_int8_runs_near_the_float_model(tiny_package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--method", "int8-static", *BLOCKS, "--smooth", "--max-error", 0.2, "--kv", "int8-tensor")
    result = run("quantize", tiny_package, out, *options)
    assert result.exit_code == 0, result.output
    record = Package.open(out).record
    assert record.quantization is not None
    expected = {"method": "int8-static", "calibrator": "mse", "smooth": True, "kv_cache": "int8-tensor"}
    assert expected.items() <= record.quantization.items()
    assert record.passes[-3:] == ("QuantizeKV", "SmoothQuant", "StaticQuantization")
    assert 0 < divergence(out, tiny_package, tmp_path) < 0.05
    again = run("quantize", out, tmp_path / "again")
    assert again.exit_code == 2
    assert "is already quantized; start from the float model" in again.stderr


@pytest.mark.long
def test_calibration_is_done_once_for_all_calibrators(
    tiny_package: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def counted(model: Path, *args: object, **options: object) -> object:
        calls.append(model)
        return input_histograms(model, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("carryall.runtime.models.float_model.input_histograms", counted)

    def scale(out: str, *options: object) -> float:
        arguments = ("quantize", tiny_package, tmp_path / out, "--method", "int8-static", *BLOCKS)
        result = run(*arguments, *options)
        assert result.exit_code == 0, result.output
        values = Package.open(tmp_path / out).load().graph.initializers
        stored = values["model.layers.0.mlp/Mul_1.scale"].const_value
        assert stored is not None
        return float(stored.numpy())

    scales = {name: scale(name, "--calibrator", name) for name in CALIBRATORS}
    assert scale("again") == scales["mse"]
    assert min(scales.values()) < max(scales.values()) == scales["minmax"]
    assert len(calls) == 1
    text = tmp_path / "own.txt"
    text.write_text("another text " * 40)
    scale("own", "--calibration", text)
    assert len(calls) == 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_half_precision(tiny_package: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "out"
    result = run("quantize", tiny_package, out, "--method", method, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["quantization"] == {"method": method, "recipe": {"method": method}}
    assert facts["bytes_after"] < 0.51 * facts["bytes_before"]
    assert divergence(out, tiny_package, tmp_path) < 1e-4
    again = run("quantize", out, tmp_path / "again", "--method", "int4-fast")
    assert again.exit_code == 2
    assert "already has 16-bit weights; start from the float model" in again.stderr


@pytest.mark.long
def test_values_that_fp16_cannot_hold_are_measured(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    source = checkpoint(tmp_path / "checkpoint", name, lambda weight: np.multiply(weight, 30000, out=weight))
    result = run("quantize", source, tmp_path / "out", "--method", "fp16")
    assert result.exit_code == 0, result.output
    assert "model.layers.0.mlp.down_proj/MatMul exceeds the range of FLOAT16" in result.stdout
    record = Package.open(tmp_path / "out").record.quantization
    assert record is not None
    assert "model.layers.0.mlp.down_proj/MatMul" in record["float"]
    assert divergence(tmp_path / "out", source, tmp_path) < 1e-2


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda folder: broken(folder, "model.embed_tokens.weight", 1e5),
            ("--method", "fp16"),
            "weight model.embed_tokens.weight reaches 1e+05, above the limit 65504 of FLOAT16",
        ),
        (
            lambda folder: broken(folder, "model.layers.1.input_layernorm.weight", np.inf),
            ("--method", "int8-static", *BLOCKS),
            "model.layers.1.input_layernorm/RMSNormalization holds NaN or infinity on the calibration text",
        ),
        (
            lambda folder: broken(folder, "model.layers.1.input_layernorm.weight", np.nan),
            ("--method", "none", "--kv", "int8-tensor"),
            "holds NaN or infinity on the calibration text",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::carryall.exporter.weights.WeightWarning")
def test_models_that_cannot_be_converted(
    make: Callable[[Path], Path], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run("quantize", make(tmp_path / "checkpoint"), tmp_path / "out", *options)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; at least 128 tokens are needed"),
        ("short", "has 5 tokens; at least 128 are needed"),
    ],
)
def test_too_little_text(tiny_package: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    options = ("--method", "int8-static", "--calibration", path)
    result = run("quantize", tiny_package, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--method", "int4-fast", "--calibrator", "mse"),
            "calibrator has no effect with method int4",
        ),
        (
            ("--method", "int8-static", "--algorithm", "gptq"),
            "algorithm has no effect with",
        ),
        (("--method", "bf16", "--block-size", "32"), "block_size has no effect with method bf16"),
        (("--method", "fp16", "--smooth"), "smooth has no effect with method fp16"),
    ],
)
def test_options_without_effect_are_refused(
    tiny_package: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run("quantize", tiny_package, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.long
def test_static_int8_is_calibrated_on_the_fly(tiny_package: Path) -> None:
    assert run("run", tiny_package, "abc", "--quantize", "int8-static", "--max-tokens", 2).exit_code == 0
