"""Command line options for the fields of a quantization recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from ..graph_opt.quantize.recipe import QuantizationRecipe
from ..options import declared
from .declared_options import declared_option, option_help

Command = Callable[..., Any]


def recipe_options(function: Command) -> Command:
    """Add an option for each field, and pass their values as one argument, ``settings``."""
    declarations = declared(QuantizationRecipe)

    @functools.wraps(function)
    def gather(**given: Any) -> Any:
        return function(settings={name: given.pop(name) for name in declarations}, **given)

    command: Command = gather
    for name, declaration in reversed([*declarations.items()]):
        shown = {"default": declaration.default, "show_default": declaration.default is not None}
        if name == "calibration":
            option = click.option(
                "--calibration", type=click.Path(exists=True), help=option_help(declaration)
            )
        else:
            option = declared_option(declaration, section="", **shown)
        command = option(command)
    return command
