"""Arguments and options that several verbs share."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..plain_json import plain_json
from ..reports import human_bytes as human_bytes
from ..storage.texts import read_text

_FILE_NAME = re.compile(r'[^\s{}\[\]:"]{1,4000}\.[A-Za-z]\w{0,9}')  # looks like no JSON or grammar
MOST_TOKENS = 1 << 20  # of one text or sequence

model_argument = click.argument("model")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document only.")

quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")

rope_scaling_option = click.option(
    "--rope-scaling",
    metavar="TYPE:FACTOR",
    help="Extend the context by a scaling of the rotary embedding: yarn:4 makes it 4 times as long; or "
    "linear:2, dynamic:2.",
)


def print_json(document: Any) -> None:
    """Print ``document`` to stdout as one line of JSON; NaN becomes null."""
    click.echo(plain_json(document))


def number(least: float = 0, most: float = math.inf, *, above: bool = False) -> click.ParamType[Any]:
    """Return a click type for finite numbers >= ``least`` (> ``least`` if ``above``) and <= ``most``."""
    return _Number(least, most, above)


class _Number(click.FloatRange):
    def __init__(self, least: float, most: float, above: bool) -> None:
        super().__init__(least, None if math.isinf(most) else most, min_open=above)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a value; NaN and infinity are refused."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


def selftest_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a self-test: whether to run it, for how long, and the file of its report."""
    testing = click.option(
        "--selftest",
        "testing",
        is_flag=True,
        help="Compare a provider with the CPU, and measure its speed and memory.",
    )
    report = click.option(
        "--selftest-report",
        "report",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help="Write the self-test as JSON, to attach to an issue.",
    )
    limit = click.option(
        "--selftest-limit",
        "limit",
        type=number(),
        default=240,
        show_default=True,
        metavar="SECONDS",
        help="Begin no further check of the self-test after this time; 0 compares the demo model only.",
    )
    return testing(report(limit(command)))


def kernel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that prepare the CPU kernels."""
    building = click.option(
        "--build-kernels", "building", is_flag=True, help="Build carryall's CPU kernels with a C++ compiler."
    )
    tuning = click.option(
        "--autotune",
        "tuning",
        is_flag=True,
        help="Measure the fastest instruction set and number of threads.",
    )
    return building(tuning(command))


def text_or_file(value: str | None, *, bare: bool = False) -> str | None:
    """Return the value of an option of the form ``TEXT|@FILE``: the text, or that of the file.

    Args:
        value: what was typed; None if the option was not.
        bare: the name of a file counts without ``@`` too, if the file exists.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8 text.
    """
    if value is None:
        return None
    if value.startswith("@"):
        return read_text(Path(value[1:]))
    if bare and _FILE_NAME.fullmatch(value):
        return read_text(Path(value))
    with contextlib.suppress(OSError, ValueError):  # a text that no name of a file can be
        if bare and Path(value).is_file():
            return read_text(Path(value))
    return value


def check_exclusive(flags: Mapping[str, bool]) -> None:
    """Check that at most one of these flags is given.

    Raises:
        UsageError: two are.
    """
    given = [name for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{given[0]} excludes {given[1]}")


def tell_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """Print the notes of a report to stderr."""
    for note in () if quiet else notes:
        click.echo(note, err=True)


BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def amount(name: str, units: Mapping[str, int], example: str) -> Callable[..., float | None]:
    """Return the callback of an option that takes a number with a unit, such as ``10GB`` or ``30d``."""
    factors = {unit.upper(): factor for unit, factor in units.items()}

    def read(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-zA-Z]*(?:/s)?)", text)
        if match is None or match[2].upper() not in factors:
            known = ", ".join(filter(None, units))
            raise click.BadParameter(
                f"'{text}' is not a valid {name}: give a number and one of {known}, such as {example}"
            )
        return float(match[1]) * factors[match[2].upper()]

    return read
