"""The help of every verb."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from carryall.cli import carryall
from carryall.cli.group import SUMMARIES


def commands(verb: str) -> list[click.Command]:
    """Return the verb, and its subcommands if it is a group."""
    command = carryall.get_command(click.Context(carryall), verb)
    assert command is not None
    return [command, *(command.commands.values() if isinstance(command, click.Group) else ())]


@pytest.mark.parametrize("verb", SUMMARIES)
def test_help_tells_purpose_and_shows_an_example(verb: str) -> None:
    last = commands(verb)[-1]
    names = [verb] if len(commands(verb)) == 1 else [verb, str(last.name)]
    result = CliRunner().invoke(carryall, [*names, "--help"])
    assert result.exit_code == 0
    usage, rest = result.stdout.split("\n", 1)
    assert usage.startswith("Usage: ")
    assert "Example" in rest
    assert f"carryall {' '.join(names)}" in rest


@pytest.mark.parametrize("verb", SUMMARIES)
def test_every_option_is_explained(verb: str) -> None:
    for command in commands(verb):
        assert command.help
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("verb", SUMMARIES)
def test_a_forgotten_or_unknown_argument_is_one_line(verb: str) -> None:
    result = CliRunner().invoke(carryall, [verb, "--no-such-option"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
