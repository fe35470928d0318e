"""Flags, environment variables and file keys, made from the fields of ``ModelConfig`` and ``EngineConfig``.

A field ``max_slots`` is the flag ``--max-slots``, the variable ``CARRYALL_MAX_SLOTS`` and the key
``max_slots`` in the table ``[engine]`` of the TOML file that ``--config`` names. A flag goes before a
variable, a variable before the file, the file before the default.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..options import Option, check_names, declared
from ..runtime.engine.config import EngineConfig
from ..runtime.models.config import ModelConfig
from ..storage.texts import read_text
from .declared_options import declared_option

Command = Callable[..., Any]

# Tables of the file, and the sections of the help, by what their keys are fields of.
TABLES: dict[str, type[Any]] = {"model": ModelConfig, "engine": EngineConfig}
VARIABLES = "CARRYALL_"
_SECTIONS = {"model": "Model and provider", "engine": "Engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What flags, variables and file choose.

    Args:
        model: which model, where and how.
        engine: how requests are scheduled.
    """

    model: ModelConfig
    engine: EngineConfig


def config_options(
    *, model: str = "MODEL", without: Collection[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """A decorator that adds the options and passes them on as one argument, ``chosen``.

    Args:
        model: how the model is given: an argument of that name, or an option if it begins with ``--``.
        without: fields that have no meaning for the verb.
        **defaults: of fields that have another default for the verb; None leaves the field's own.
    """
    fields = [
        (table, declaration)
        for table, owner in TABLES.items()
        for declaration in declared(owner).values()
        if declaration.name not in without
    ]
    parameters = [_parameter(table, one, model, defaults) for table, one in fields]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def gather(**given: Any) -> Any:
            found: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
            for table, declaration in fields:
                value = given.pop(declaration.name)
                if value is not None and value != ():
                    found[table][declaration.name] = value
            if "model" not in found["model"]:
                raise UsageError(f"no model is given: name {model}, set CARRYALL_MODEL, or use --config")
            chosen = Chosen(model=ModelConfig(**found["model"]), engine=EngineConfig(**found["engine"]))
            return function(chosen=chosen, **given)

        command: Command = gather
        for parameter in reversed([*parameters, _config_option()]):
            command = parameter(command)
        return command

    return decorate


def chosen_fields(chosen: Chosen) -> dict[str, Any]:
    """The model's name, and as ``loading`` the fields that differ from their defaults, in values of JSON."""
    found: dict[str, Any] = {}
    for config in (chosen.model, chosen.engine):
        for name, declaration in declared(type(config)).items():
            value = getattr(config, name)
            if name != "model" and value != declaration.default:
                found[name] = str(value) if isinstance(value, Path) else value
    return {"model": str(chosen.model.model), "loading": found}


def model_elsewhere(ctx: click.Context) -> str | None:
    """The model that the environment or the file names."""
    return os.environ.get(f"{VARIABLES}MODEL") or (ctx.default_map or {}).get("model")


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file, their values checked.

    Raises:
        UsageError: it cannot be read, or a table, a key or a value is not one that there is.
    """
    try:
        content = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    check_names(content, TABLES, str(path))
    found: dict[str, dict[str, Any]] = {}
    for table, values in content.items():
        owner = f"table [{table}] of {path}"
        if not isinstance(values, dict):
            raise UsageError(f"{owner} must be a table, not {values!r}")
        known = declared(TABLES[table])
        check_names(values, known, owner)
        found[table] = {name: _from_file(known[name], value, owner) for name, value in values.items()}
    return found


def _from_file(declaration: Option, value: Any, owner: str) -> Any:
    if declaration.repeated and isinstance(value, list):
        return tuple(declaration.parse(one, owner) if isinstance(one, str) else one for one in value)
    # A size may be a text with a unit; other numbers are numbers in TOML too.
    if declaration.unit == "bytes" and isinstance(value, str):
        return declaration.parse(value, owner)
    return declaration.check(value, owner)


def _parameter(
    table: str, declaration: Option, model: str, defaults: Mapping[str, Any]
) -> Callable[[Command], Command]:
    name, variable = declaration.name, VARIABLES + declaration.name.upper()
    if name == "model":
        if not model.startswith("--"):
            return click.argument(name, metavar=model, required=False, envvar=variable)
        declaration = dataclasses.replace(declaration, flags=(model,))
    default = defaults.get(name, declaration.default)
    return declared_option(
        declaration,
        section=_SECTIONS[table],
        envvar=variable,
        default=None if default is MISSING else default,
        show_default=default is not MISSING and default is not None,
    )


def _config_option() -> Callable[[Command], Command]:
    return click.option(
        "--config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        envvar=VARIABLES + "CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_take_file,
        help="A TOML file with options, in the tables [model] and [engine]: --max-slots is max_slots there, "
        "and CARRYALL_MAX_SLOTS in the environment. Flags go before variables, variables before the file.",
    )


def _take_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Let a file's values be the defaults of the flags."""
    if path is None:
        return
    defaults = {name: value for values in read_file(path).values() for name, value in values.items()}
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            defaults[name] = [f"{key}={json.dumps(one)}" for key, one in value.items()]
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
