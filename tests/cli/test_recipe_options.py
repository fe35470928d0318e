"""Every field of a recipe is an option of ``carryall quantize``; bad numbers are an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall import QuantizationRecipe
from carryall.cli import carryall
from carryall.cli.verbs.quantize import command
from carryall.errors import UsageError
from carryall.options import declared


def test_every_field_is_an_option_with_help() -> None:
    options = {parameter.name: parameter for parameter in command.params}
    for name, declaration in declared(QuantizationRecipe).items():
        text = getattr(options[name], "help", "")
        assert len(text) > 20
        assert text[1:] == declaration.help[1:]


def test_a_budget_may_name_its_unit() -> None:
    budget = declared(QuantizationRecipe)["budget"]
    assert [budget.parse(text) for text in ("4.5bits", "4.5", "5")] == [4.5, 4.5, 5.0]
    with pytest.raises(UsageError, match="budget must be a number of bits, more than 0 and at most 32"):
        budget.parse("4.5bytes")


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
