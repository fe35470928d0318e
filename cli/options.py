"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Any

import click

from ..plain_json import plain_json

model_argument = click.argument("model")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")

quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")


def print_json(document: Any) -> None:
    """Write ``document`` to stdout as one line of JSON, in which NaN is null."""
    click.echo(plain_json(document))


def human_bytes(size: float) -> str:
    """Return a size for people, in powers of 1000: ``14.7 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
