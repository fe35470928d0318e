"""Every verb that runs a model takes the same options for where and how it is loaded, and passes them on."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.errors import CarryallError

EVERYWHERE = {
    *("--provider", "--split", "--provider-option", "--ep-library", "--allow-fallback"),
    *("--quantize", "--context-length", "--kv-cache-dtype", "--num-threads", "--config"),
}
VERBS = {
    "run": ["MODEL", "a"],
    "chat": ["MODEL"],
    "bench": ["MODEL"],
    "serve": ["MODEL", "--grpc-port", "0"],
    "eval": ["MODEL", "--text", "TEXT"],
    "batch": ["run", "TEXT", "-o", "-", "--model", "MODEL"],
}


def options_of(verb: str) -> set[str]:
    command = carryall.get_command(click.Context(carryall), verb)
    if isinstance(command, click.Group):
        command = command.commands["run"]
    assert command is not None
    return {name for option in command.params for name in option.opts}


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_are_there(verb: str) -> None:
    assert options_of(verb) >= EVERYWHERE


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ep-library", "missing.so"], "no plugin library missing.so"),
        (["--split", "cpu:0-0,null:1-1", "--context-length", "9999"], "context_length 9999"),
        (["--provider-option", "speed=11"], "has no option 'speed'"),
    ],
)
def test_they_reach_the_loading(
    verb: str, options: list[str], words: str, tiny_package: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text('{"prompt": "some words"}\n')
    given = [{"MODEL": str(tiny_package), "TEXT": str(text)}.get(part, part) for part in VERBS[verb]]
    result = CliRunner().invoke(carryall, [verb, *given, *options], input="hello\n")
    assert result.exit_code != 0
    said = str(result.exception) if isinstance(result.exception, CarryallError) else result.output
    assert words in said
