"""``carryall cache``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...runtime.models.cache_entries import CacheEntry, cache_entries, prune, remove_entries
from ...storage.root import cache_root
from ..options import human_bytes, json_option, print_json

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _amount(name: str, units: Mapping[str, int], example: str) -> Callable[..., float | None]:
    """Return the callback of an option that takes a number with a unit, such as ``10GB`` or ``30d``."""
    factors = {unit.upper(): factor for unit, factor in units.items()}

    def read(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-zA-Z]*)", text)
        if found is None or found[2].upper() not in factors:
            known = ", ".join(filter(None, units))
            raise click.BadParameter(
                f"'{text}' is not a valid {name}: give a number and one of {known}, such as {example}"
            )
        return float(found[1]) * factors[found[2].upper()]

    return read


@click.group("cache")
def command() -> None:
    """List, prune or clear the cache of prepared models.

    The cache holds exported packages, graphs lowered for a provider, and measurements. Its folder is
    $CARRYALL_CACHE, by default the user's cache folder. Deleted entries are created again when needed.
    """


@command.command("list")
@json_option
def show(as_json: bool) -> None:
    """Show the entries of the cache: kind, size, age, and model.

    \b
    Example:
        carryall cache list
    """
    entries = cache_entries()
    total = sum(entry.size for entry in entries)
    if as_json:
        print_json({"folder": str(cache_root()), "bytes": total, "entries": list(map(_facts, entries))})
        return
    if entries:
        table = Table("kind", "size", "used", "of", box=None, pad_edge=False)
        for entry in entries:
            table.add_row(entry.kind, human_bytes(entry.size), _age(entry.used), Text(_about(entry)))
        Console().print(table)
    click.echo(f"{cache_root()}: {_count(entries)}, {human_bytes(total)}")


@command.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Delete all entries of the cache, after a question unless --yes is given.

    \b
    Example:
        carryall cache clear --yes
    """
    entries = cache_entries()
    if entries and not yes:
        size = human_bytes(sum(entry.size for entry in entries))
        click.confirm(f"Delete {_count(entries)}, {size}, in {cache_root()}?", abort=True, err=True)
    _tell(remove_entries(entries), as_json=as_json)


@command.command("prune")
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=_amount("size", _BYTES, "10GB"),
    help="Delete the least recently used entries until the rest is at most this large: 10GB.",
)
@click.option(
    "--older-than",
    metavar="AGE",
    callback=_amount("age", _SECONDS, "30d"),
    help="Delete entries that were not used for this long: 30d, 12h.",
)
@json_option
def prune_entries(max_size: float | None, older_than: float | None, as_json: bool) -> None:
    """Delete the least recently used entries. Those used within the last hour stay.

    Without an option, the cache is reduced to $CARRYALL_CACHE_GB gigabytes, by default 32.

    \b
    Examples:
        carryall cache prune --max-size 10GB
        carryall cache prune --older-than 30d
    """
    _tell(prune(max_size, older_than), as_json=as_json)


def _tell(removed: Sequence[CacheEntry], *, as_json: bool) -> None:
    freed = sum(entry.size for entry in removed)
    left = sum(entry.size for entry in cache_entries())
    if as_json:
        print_json({"removed": list(map(_facts, removed)), "freed_bytes": freed, "left_bytes": left})
        return
    click.echo(f"deleted {_count(removed)}, {human_bytes(freed)}; {human_bytes(left)} left")


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "bytes": entry.size,
        "idle_seconds": max(0, round(time.time() - entry.used)),
        "about": dict(entry.about),
    }


def _count(entries: Sequence[CacheEntry]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def _about(entry: CacheEntry) -> str:
    said = [
        str(value) if name == "model" else f"{name} {value}" for name, value in entry.about.items() if value
    ]
    return ", ".join(said) or entry.path.name


def _age(used: float) -> str:
    age = max(0.0, time.time() - used)
    for unit, seconds in reversed(_SECONDS.items()):
        if age >= 2 * seconds and unit != "w":
            return f"{age / seconds:.0f} {unit} ago"
    return "now"
