"""Flags, environment variables and file keys, made from the fields of dataclasses of options.

These are ``ModelConfig`` and ``EngineConfig``, and for ``carryall serve`` also ``ServerConfig``.

A field ``max_slots`` is the flag ``--max-slots``, the variable ``CARRYALL_MAX_SLOTS`` and the key
``max_slots`` in the table ``[engine]`` of the TOML file of ``--config``. Flags override variables, variables
override the file, and the file overrides the defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..options import Option, check_names, declared
from ..records import dataclass
from ..runtime.engine.config import EngineConfig
from ..runtime.models.config import ModelConfig
from ..runtime.service.core.config import ServerConfig
from ..storage.texts import read_text
from .declared_options import declared_option
from .lmcache_variables import lmcache_options

Command = Callable[..., Any]

_log = logging.getLogger(__name__)

# Fields of LoRA adapters, for verbs that measure the model itself.
LORA_FIELDS = ("loras", "max_loras", "max_lora_rank", "lora_modules")
# The tables of the file, with the dataclass of each.
TABLES: dict[str, type[Any]] = {"model": ModelConfig, "engine": EngineConfig}
SERVER_TABLES: dict[str, type[Any]] = {**TABLES, "server": ServerConfig}
VARIABLES = "CARRYALL_"
_FILE = f"{__name__}.file"  # the key of the file in the context
_SECTIONS = {"model": "Model and provider", "engine": "Engine", "server": "Service"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The options chosen by flags, variables and file.

    Args:
        model: options of the model.
        engine: options of the engine.
        server: options of the service; defaults for verbs that do not serve.
        reread: returns the options of the service with the present values of the file; None without a file.
    """

    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    reread: Callable[[], ServerConfig] | None = None


def config_options(
    *,
    model: str = "MODEL",
    without: Collection[str] = (),
    tables: Mapping[str, type[Any]] = TABLES,
    **defaults: Any,
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options and passes them as one argument, ``chosen``.

    Args:
        model: the name of the model's argument; an option if it begins with ``--``.
        without: fields that do not apply to the verb.
        tables: dataclasses of the options.
        **defaults: defaults of the verb that differ from those of the fields.
    """
    fields = [
        (table, declaration)
        for table, owner in tables.items()
        for declaration in declared(owner).values()
        if declaration.name not in without
    ]
    parameters = [_parameter(table, one, model, defaults) for table, one in fields]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def gather(**arguments: Any) -> Any:
            tables: dict[str, dict[str, Any]] = {table: {} for table in SERVER_TABLES}
            for table, declaration in fields:
                value = arguments.pop(declaration.name)
                if value not in (None, ()) or (value is None and _is_given(declaration)):
                    tables[table][declaration.name] = value
            tables["engine"] |= _of_lmcache(fields)
            folder = tables["server"].get("models")
            if folder is not None and "model" in tables["model"]:
                raise UsageError(f"both {model} and --models are given; leave one out")
            if folder is not None:
                tables["model"]["model"] = folder
            if "model" not in tables["model"]:
                raise UsageError(f"no model is given: name {model}, set CARRYALL_MODEL, or use --config")
            chosen = Chosen(
                **{table: owner(**tables[table]) for table, owner in SERVER_TABLES.items()},
                reread=_reread(tables["server"]),
            )
            return function(chosen=chosen, **arguments)

        command: Command = gather
        for parameter in reversed([*parameters, _config_option()]):
            command = parameter(command)
        return command

    return decorate


def _of_lmcache(fields: Collection[tuple[str, Option]]) -> dict[str, Any]:
    """Return the options of the engine that only variables of LMCache name."""
    default = click.core.ParameterSource.DEFAULT
    source = click.get_current_context().get_parameter_source
    free = {one.name for table, one in fields if table == "engine" and source(one.name) in (None, default)}
    return {name: value for name, value in lmcache_options(os.environ).items() if name in free}


def _reread(arguments: Mapping[str, Any]) -> Callable[[], ServerConfig] | None:
    """Return a function that reads the service's options again; flags and variables stay as they are."""
    ctx = click.get_current_context()
    path: Path | None = ctx.meta.get(_FILE)
    if path is None:
        return None
    sources = click.core.ParameterSource
    fixed = {
        name: value
        for name, value in arguments.items()
        if ctx.get_parameter_source(name) in (sources.COMMANDLINE, sources.ENVIRONMENT)
    }

    began = read_file(path)

    def reread() -> ServerConfig:
        file = read_file(path)
        later = [name for table in TABLES for name in _changed(began.get(table, {}), file.get(table, {}))]
        if later:
            _log.warning("these settings change after a restart only: %s", ", ".join(later))
        values = file.get("server", {})
        read = {name: None if value == "none" else value for name, value in values.items()}
        return ServerConfig(**{**read, **fixed})

    return reread


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that only one of them has."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _is_given(declaration: Option) -> bool:
    """Whether "none" was asked for, instead of nothing."""
    default = click.core.ParameterSource.DEFAULT
    source = click.get_current_context().get_parameter_source(declaration.name)
    return declaration.optional and source not in (None, default)


def chosen_fields(chosen: Chosen) -> dict[str, Any]:
    """Return the model's name, and as ``loading`` the fields that differ from their defaults, for JSON."""
    fields: dict[str, Any] = {}
    for config in (chosen.model, chosen.engine):
        for name, declaration in declared(type(config)).items():
            value = getattr(config, name)
            if name != "model" and value != declaration.default:
                fields[name] = str(value) if isinstance(value, Path) else value
    return {"model": str(chosen.model.model), "loading": fields}


def model_elsewhere(ctx: click.Context) -> str | None:
    """Return the model that the environment or the file names, None if neither does."""
    return os.environ.get(f"{VARIABLES}MODEL") or (ctx.default_map or {}).get("model")


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML file with checked values.

    Raises:
        UsageError: the file cannot be read, or a table, key or value is unknown or invalid.
    """
    import tomllib  # 2 ms of each start without a file

    try:
        content = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    check_names(content, SERVER_TABLES, str(path))
    tables: dict[str, dict[str, Any]] = {}
    for table, values in content.items():
        owner = f"table [{table}] of {path}"
        if not isinstance(values, dict):
            raise UsageError(f"{owner} must be a table, not {values!r}")
        known = declared(SERVER_TABLES[table])
        check_names(values, known, owner)
        tables[table] = {name: _from_file(known[name], value, owner) for name, value in values.items()}
    return tables


def _from_file(declaration: Option, value: Any, owner: str) -> Any:
    if declaration.repeated and isinstance(value, list):
        return tuple(declaration.parse(one, owner) if isinstance(one, str) else one for one in value)
    if declaration.optional and value == "none":  # TOML has no null
        return value
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
        help="A TOML file with options in the tables [model], [engine] and [server], such as max_slots for "
        "--max-slots. Flags override variables (CARRYALL_MAX_SLOTS), and variables override the file.",
    )


def _take_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make a file's values the defaults of the flags."""
    if path is None:
        return
    ctx.meta[_FILE] = path
    defaults = {name: value for values in read_file(path).values() for name, value in values.items()}
    for name, value in defaults.items():
        if isinstance(value, Mapping):
            defaults[name] = [f"{key}={json.dumps(one)}" for key, one in value.items()]
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
