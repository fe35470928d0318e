"""Command line options for the fields of a quantization recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click

from ..graph_opt.quantize.recipe import QuantizationRecipe
from .options import number

Command = Callable[..., Any]


def recipe_options(function: Command) -> Command:
    """Add an option for each field, and pass their values as one argument, ``settings``."""
    names = [one.name for one in dataclasses.fields(QuantizationRecipe)]

    @functools.wraps(function)
    def gather(**given: Any) -> Any:
        return function(settings={name: given.pop(name) for name in names}, **given)

    command: Command = gather
    for one in reversed(dataclasses.fields(QuantizationRecipe)):
        command = _option(one)(command)
    return command


def _option(one: dataclasses.Field[Any]) -> Callable[[Command], Command]:
    flag, limits = f"--{one.name.replace('_', '-')}", one.metadata
    text = limits["help"]
    if one.name == "symmetric":
        return click.option("--symmetric/--asymmetric", default=None, help=text)
    if one.name == "budget":
        return click.option(flag, metavar="BITS", callback=_bits, help=text)
    if one.name == "calibration":
        return click.option(flag, type=click.Path(exists=True), help=text)
    if one.type == "bool | None":
        return click.option(f"{flag}/--no-{one.name}", default=None, help=text)
    return click.option(
        flag, type=_kind(one), default=one.default, show_default=one.default is not None, help=text
    )


def _kind(one: dataclasses.Field[Any]) -> click.ParamType[Any]:
    limits = one.metadata
    if limits["choices"]:
        return click.Choice(limits["choices"])
    if "int" in str(one.type):
        return click.IntRange(int(limits["least"]), int(limits["most"]))
    above = limits["least"] is None
    return number(limits["above"] if above else limits["least"], limits["most"], above=above)


def _bits(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return the number in ``4.5bits`` or ``4.5``."""
    if value is None:
        return None
    try:
        return float(value.removesuffix("bits").removesuffix("bit"))
    except ValueError as error:
        raise click.BadParameter(
            f"a budget must be a number of bits, such as 4.5bits, not '{value}'"
        ) from error
