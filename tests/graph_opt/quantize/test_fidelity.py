"""Calibrated quantization of a trained model, measured by its predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.exporter.demo import CALIBRATION_TEXT


def run(*args: object) -> str:
    result = CliRunner().invoke(carryall, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_calibration_beats_rounding_at_every_block_size(block_size: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[:60_000])
    divergence = {}
    for algorithm in ("rtn", "awq", "gptq"):
        out = tmp_path / algorithm
        options = ["--method", "int4-fast", "--block-size", block_size, "--quiet"]
        options += ["--algorithm", algorithm, *([] if algorithm == "rtn" else ["--calibration", text])]
        run("quantize", "demo", out, *options)
        options = ["--reference", "demo", "--max-tokens", 6000, "--prompts", 0, "--window", 512, "--json"]
        divergence[algorithm] = json.loads(run("eval", out, *options))["mean_kl"]
    assert divergence["gptq"] < 0.7 * divergence["rtn"]
    assert divergence["awq"] < 0.97 * divergence["rtn"]
