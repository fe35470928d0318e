"""Print entries of the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from ...storage.cache_entries import CacheEntry, cache_entries
from ..options import SECONDS, human_bytes, print_json


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
