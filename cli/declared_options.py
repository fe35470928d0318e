"""Flags of declared options: name, type, range and help come from the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..options import Option
from .sections import SectionOption

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def declared_option(declaration: Option, **attributes: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds the flag of an option.

    Args:
        declaration: the declaration of the field.
        **attributes: attributes of the click option, such as ``section`` and ``default``. Attributes that
            follow from the declaration replace them, except ``help``.
    """
    flags = declaration.flags or (f"--{declaration.name.replace('_', '-')}",)
    settings: dict[str, Any] = {"type": DeclaredType(declaration)}
    if Mapping in declaration.kinds:
        settings = {"multiple": True, "metavar": "NAME=VALUE", "callback": _pairs, "default": None}
    elif declaration.repeated:
        settings |= {"multiple": True, "default": None}
    elif declaration.kinds == (bool,):
        settings = {"is_flag": True}
        if "/" not in flags[0]:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}", *flags[1:])
    attributes = {"help": option_help(declaration), **attributes, **settings}
    return click.option(*flags, declaration.name, cls=SectionOption, **attributes)


class DeclaredType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """The click type of a declared option, which parses and checks its values."""

    def __init__(self, declaration: Option) -> None:
        self._declaration = declaration
        kinds = [_METAVARS.get(kind, "MODULE:NAME") for kind in declaration.kinds]
        self.name = "|".join(map(str, declaration.choices)) or kinds[0]
        if declaration.unit in ("bytes", "bits"):
            self.name = declaration.unit.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if isinstance(value, str):
                return self._declaration.parse(value)
            return value if self._declaration.repeated else self._declaration.check(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return f"[{self.name}]" if self._declaration.choices else self.name


def option_help(declaration: Option) -> str:
    """Return the help of a field, from its docstring without code marks."""
    text = declaration.help.replace("``", "")
    return text[:1].upper() + text[1:] + (" May be repeated." if declaration.repeated else "")


def _pairs(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE pairs as a dict; values that are valid JSON are converted, others are strings."""
    pairs: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE, such as device=1")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs
