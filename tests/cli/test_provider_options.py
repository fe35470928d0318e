"""--provider-option NAME=VALUE and --provider NAME:DEVICE reach the provider, which rejects unknown ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.errors import CarryallError


@pytest.mark.parametrize("verb", ["run", "bench", "eval"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--provider-option", "speed=11"], "provider 'cpu' has no option 'speed'; it has: "),
        (["--provider", "cpu:1"], "provider 'cpu' has no devices to choose from; omit '1'"),
    ],
)
def test_unknown_options_of_a_provider_are_refused(
    verb: str, options: list[str], words: str, tiny_package: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to predict")
    own = {"run": ["a"], "eval": ["--text", str(text)]}.get(verb, [])
    arguments = [verb, str(tiny_package), *own, *options]
    result = CliRunner().invoke(carryall, arguments)
    assert result.exit_code != 0
    said = str(result.exception) if isinstance(result.exception, CarryallError) else result.output
    assert words in said
