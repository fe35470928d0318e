"""``carryall cache``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...storage.cache_entries import CacheEntry, cache_entries, prune, remove_entries, sweep_temporary
from ...storage.root import cache_root
from ..options import BYTES, SECONDS, amount, human_bytes, json_option, print_json


def tell_removed(removed: Sequence[CacheEntry], temporary_bytes: int, *, as_json: bool) -> None:
    """Print which entries were deleted, and the size of deleted temporary files."""
    freed = sum(entry.size for entry in removed)
    left = sum(entry.size for entry in cache_entries())
    if as_json:
        facts = {"freed_bytes": freed, "freed_temporary_bytes": temporary_bytes, "left_bytes": left}
        print_json({"removed": list(map(entry_facts, removed)), **facts})
        return
    click.echo(f"deleted {count_text(removed)}, {human_bytes(freed)}; {human_bytes(left)} left")
    if temporary_bytes:
        click.echo(f"deleted temporary files of ended processes, {human_bytes(temporary_bytes)}")


def entry_facts(entry: CacheEntry) -> dict[str, Any]:
    """Return an entry as JSON."""
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "bytes": entry.size,
        "idle_seconds": max(0, round(time.time() - entry.used)),
        "about": dict(entry.about),
    }


def count_text(entries: Sequence[CacheEntry]) -> str:
    """Return the number of entries as text."""
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def about_text(entry: CacheEntry) -> str:
    """Return what an entry holds: its model and how it was prepared."""
    said = [
        str(value) if name == "model" else f"{name} {value}" for name, value in entry.about.items() if value
    ]
    return ", ".join(said) or entry.path.name


def age_text(used: float) -> str:
    """Return how long ago an entry was used, given as Unix time."""
    age = max(0.0, time.time() - used)
    for unit, seconds in reversed(SECONDS.items()):
        if age >= 2 * seconds and unit != "w":
            return f"{age / seconds:.0f} {unit} ago"
    return "now"


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
        print_json({"folder": str(cache_root()), "bytes": total, "entries": list(map(entry_facts, entries))})
        return
    if entries:
        table = Table("kind", "size", "used", "of", box=None, pad_edge=False)
        for entry in entries:
            table.add_row(entry.kind, human_bytes(entry.size), age_text(entry.used), Text(about_text(entry)))
        Console().print(table)
    click.echo(f"{cache_root()}: {count_text(entries)}, {human_bytes(total)}")


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
        click.confirm(f"Delete {count_text(entries)}, {size}, in {cache_root()}?", abort=True, err=True)
    tell_removed(remove_entries(entries), sweep_temporary(), as_json=as_json)


@command.command("prune")
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=amount("size", BYTES, "10GB"),
    help="Delete the least recently used entries until the rest is at most this large: 10GB.",
)
@click.option(
    "--older-than",
    metavar="AGE",
    callback=amount("age", SECONDS, "30d"),
    help="Delete entries that were not used for this long: 30d, 12h.",
)
@json_option
def prune_entries(max_size: float | None, older_than: float | None, as_json: bool) -> None:
    """Delete the least recently used entries. Those used within the last hour stay.

    Without an option, the cache is reduced to $CARRYALL_CACHE_GB gigabytes, by default 32. Temporary files
    that killed processes left in the cache and in the folder of temporary files ($TMPDIR) are deleted too.

    \b
    Examples:
        carryall cache prune --max-size 10GB
        carryall cache prune --older-than 30d
    """
    tell_removed(prune(max_size, older_than), sweep_temporary(), as_json=as_json)
