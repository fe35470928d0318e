"""Every field of a recipe is an option of ``carryall quantize``; bad numbers are an error of one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall import QuantizationRecipe
from carryall.cli import carryall
from carryall.cli.verbs.quantize import command


def test_every_field_is_an_option_with_help() -> None:
    options = {parameter.name: parameter for parameter in command.params}
    for field in dataclasses.fields(QuantizationRecipe):
        assert getattr(options[field.name], "help", None) == field.metadata["help"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "demo", "OUT", "--budget", "nan"],
        ["quantize", "demo", "OUT", "--budget", "-3bits"],
        ["quantize", "demo", "OUT", "--budget", "1e400"],
        ["quantize", "demo", "OUT", "--max-kl", "nan"],
        ["quantize", "demo", "OUT", "--max-kl", "inf"],
        ["quantize", "demo", "OUT", "--method", "int8-dynamic", "--max-error", "nan"],
        ["quantize", "demo", "OUT", "--kv", "int8", "--calibration-tokens", "99999999999999999999"],
        ["quantize", "demo", "OUT", "--block-size", "-1"],
        ["optimize", "demo", "OUT", "--target", "cpu", "--context-length", "99999999999999999999"],
        ["optimize", "demo", "OUT", "--verify", "--max-kl", "nan"],
        ["optimize", "demo", "OUT", "--verify", "--max-error", "-1"],
        ["verify", "demo", "demo", "--max-kl", "nan"],
        ["verify", "demo", "demo", "--steps", "99999999999999999999"],
        ["eval", "demo", "--window", "99999999999999999999"],
        ["eval", "demo", "--max-tokens", "-1"],
        ["bench", "demo", "--batch", "10000000"],
        ["bench", "demo", "--prompt-tokens", "100000000000000"],
    ],
)
def test_numbers_out_of_range_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = CliRunner().invoke(carryall, [out if word == "OUT" else word for word in arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert list(tmp_path.iterdir()) == []
